"""The step as data: graph, lifetimes, schedules, simulation."""
