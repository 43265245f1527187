"""What planning, committing and agreeing cost in jobs of many processes."""
