"""Bridges to the libraries that models come from; each module imports its library when it is first used."""
