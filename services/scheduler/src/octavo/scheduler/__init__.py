"""The scheduler service: owns the life of every request, and decides who runs in each step."""
