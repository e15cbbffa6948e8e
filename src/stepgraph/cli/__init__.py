"""The commands: parse, call, print. What they report comes from the rooms below."""
