"""What failed first, whose fault it is, and whether another try makes sense."""
