"""Apply a plan: unit binding, records and holders, replay, retry."""
