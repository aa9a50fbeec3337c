"""What a rank records of each iteration."""
