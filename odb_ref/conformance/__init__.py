"""A conformance kit for planners of known lengths and for the online protocol, of any project and in any language. Spec: R13.

    python -m odb_ref.conformance run --planner package.module:function
    python -m odb_ref.conformance run -- COMMAND

puts the cases of ``spec/vectors/v1`` to an implementation and says which properties it keeps. `vectors` reads the cases;
`asking` puts one to a function or a program, in one place or on ranks that exchange in a virtual world, and never waits for
ever; `judge` says what is wrong with an answer, by the problem alone; `running` draws the verdicts, and `reports` writes
them down.
"""
