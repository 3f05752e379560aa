"""Small words of reports."""


def counted(number: int, noun: str) -> str:
    """`1 graph`, `2 graphs`, `2 launches`."""
    return f"{number:,} {noun}" + ("" if number == 1 else "es" if noun.endswith("ch") else "s")
