"""What every engine shares: a round, the site that it runs at, and what is kept of it."""
