"""Decide: actions, rules, policies and their ladder. Imports no torch."""
