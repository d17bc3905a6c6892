"""From what a deployment prints, answers and is configured by, to facts.

The one thing to know: a reader takes what it can and says what it could not read. It never guesses a default that the engine might have
changed: a default is only noted where it is known for that version, and then says so in `where`.
"""
