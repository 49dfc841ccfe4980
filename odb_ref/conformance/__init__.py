"""A conformance kit for any project, in any language: for planners of known lengths and for the online protocol. Spec: R13.

    python -m odb_ref.conformance run --planner package.module:function
    python -m odb_ref.conformance run -- COMMAND

puts the cases of ``spec/vectors/v1`` to an implementation and reports which properties it keeps. `vectors` reads the cases.
`asking` puts a case to a function or a program, either in one process or on ranks that exchange in a virtual world, and never
waits for ever. `judge` finds what is wrong with an answer, from the problem alone. `running` makes the verdicts, and
`reports` writes them.
"""
