"""Whole modules answered by one kernel each, in the user's process."""
