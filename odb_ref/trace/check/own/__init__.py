"""Judges one rank part by part: what it reads, holds, offers, forms and hands out."""
