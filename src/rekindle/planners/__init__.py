"""Planners: pure functions (StepGraph, Profile, budget in bytes) -> Plan."""
