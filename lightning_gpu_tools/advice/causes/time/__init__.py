"""Causes that slow training down."""
