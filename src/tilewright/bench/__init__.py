"""Measuring: what a call costs the CPU. Device timing, roofs and reports are still to come."""
