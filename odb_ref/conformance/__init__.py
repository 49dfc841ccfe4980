"""A conformance kit for planners of known lengths, of any project and in any language. Spec: R13.

    python -m odb_ref.conformance run --planner package.module:function
    python -m odb_ref.conformance run -- COMMAND

runs a planner on the cases of ``spec/vectors/v1`` and says which properties it keeps. `judge` says what is wrong with a plan,
by the problem and the indices alone; `vectors` reads the cases; `planners` asks a planner, in one place or on ranks that
exchange in a virtual world; `running` draws the verdicts.
"""
