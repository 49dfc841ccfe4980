"""Tables for terminals and pages for browsers."""
