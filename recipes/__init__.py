"""Recipes: schema, loader and the YAML files that ship with the package."""
