"""Policies of LeRobot."""
