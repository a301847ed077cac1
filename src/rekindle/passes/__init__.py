"""FX helpers and facts about operators that tracing, the engines and `rekindle.compile` share."""
