"""What outlives a job: black boxes, the folders they lie in, and what they tell."""
