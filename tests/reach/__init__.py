"""The versions of Python, torch and the frameworks that the package runs with, tried in one environment after another."""
