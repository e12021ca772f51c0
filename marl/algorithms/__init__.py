"""Algorithms: which rewards and which critic each agent learns from; one file each."""
