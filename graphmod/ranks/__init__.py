"""What the ranks of a distributed program do together."""
