"""A step cut at its breaks, and each piece between them compiled by torch's compiler."""
