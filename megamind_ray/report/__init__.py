"""Rendering of pure data for people: tables here, files for viewers beside it. No torch, no ray."""
