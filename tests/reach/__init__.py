"""What versions of Python, torch and the frameworks this runs with, tried one environment after the other."""
