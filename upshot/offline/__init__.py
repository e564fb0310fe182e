"""Tables: base vs proactive vs trained; the CoT monitor; the judge judged."""
