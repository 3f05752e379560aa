"""Guards: what the Python code of a call read, as notes while it runs (`reads` writes them) and compared before each
replay. `values` tells where attributes live, `changes` what the call changed itself.
"""
