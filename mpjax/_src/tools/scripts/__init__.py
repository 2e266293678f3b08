"""Runs other people's scripts: what they differentiate is planned or surveyed."""
