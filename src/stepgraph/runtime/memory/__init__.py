"""What graphs cost, who has which bytes, and what a capture will take."""
