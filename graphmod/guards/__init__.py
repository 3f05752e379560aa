"""Guards: what the Python code of a call read, noted while it ran, and compared before each replay.

`reads` tells from bytecode what an instruction reads, `lookup` where that lives, `frames` watches the frames that run,
`notes` collects what they read and what they changed, `guards` compares it later, `chance` watches random states.
"""
