"""Shared by technology, ignorant of ops: launching, memory, row geometry, NVRTC, device helpers."""
