"""What a step costs: measured, defined, and written down in one form."""
