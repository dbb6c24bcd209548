"""A drill: the services of one machine die, are replaced, or run for long, under load."""
