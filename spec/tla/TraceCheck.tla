----------------------------- MODULE TraceCheck -----------------------------
(* Is a recorded run a behaviour of the model? TraceData.tla, which tests/tla/traces.py makes from an odb-trace file, holds the
   lines as records. Each line must be what the model's rank does in its state on that event, effect by effect. Where the model
   knows only sizes (how samples of different lengths are grouped), the trace's numbers are taken if the rules allow them. A
   line that the model cannot follow is a deadlock. *)
EXTENDS Dgap, TraceData

VARIABLE at  \* the next line

e == Trace[at]

Numbers(first, n) == [i \in 1..n |-> first + i - 1]

\* R3.1, except what depends on lengths: the groups, whether one is less than half full, and what is due.
IsSameOffer(s, mine, theirs) ==
    /\ theirs.kind = "offer"
    /\ \A name \in {"round", "ready", "failed", "stop", "step", "samples", "budget"} : mine[name] = theirs[name]
    /\ theirs.groups <= s.held /\ (s.held > 0 => theirs.groups > 0) /\ theirs.due <= theirs.groups
    /\ IF s.ended THEN theirs.reading = None
       ELSE theirs.reading \in {theirs.groups} \union IF theirs.groups > 1 THEN {theirs.groups - 1} ELSE {}

\* R4: `sizes` is a possible result for T steps of a rank with `held` samples in `groups` groups.
IsAlignment(sizes, held, groups, T) ==
    /\ Len(sizes) = T
    /\ Sum(sizes) <= held
    /\ groups > T => \A i \in 1..T : sizes[i] > 0
    /\ groups <= T => Sum(sizes) = held
    /\ (\E i \in 1..T : sizes[i] = 0) => Sum(sizes) = held /\ \A i \in 1..T : sizes[i] <= 1 /\ (i <= held => sizes[i] = 1)

IsSameAgreement(a) ==
    /\ answer.kind = "offer"
    /\ \A name \in {"failed", "stop", "step", "ready", "samples", "reading", "groups", "due", "budget"} : answer[name] = a[name]

\* What the model makes of the line: a set with the rank's next state, or the empty set.
Outcomes(r, s) ==
    CASE e.kind = "start" -> IF s = Fresh(r) THEN {s} ELSE {}
      [] e.kind = "samples_read" ->
             IF s.reading >= e.n /\ s.read + e.n <= Readable(r, s) /\ (e.ended => s.read + e.n = Readable(r, s))
                /\ (e.full => ~e.ended /\ e.n < s.reading /\ s.held + e.n > 0)
             THEN {AfterReadOf(r, s, e.n, e.ended, e.full)} ELSE {}
      [] e.kind = "collated" -> IF s.collating = e.round THEN {AfterCollate(r, s)} ELSE {}
      [] e.kind = "agreed" ->
             IF r \in owed /\ s.post.kind = "offer" /\ IsSameAgreement(e.agreement)
                /\ (IsGoingOn(answer) =>
                        e.post.kind = "counts" /\ IsAlignment(e.post.sizes, s.held, s.post.groups, answer.target))
             THEN {AfterAgreed(r, s, answer, IF IsGoingOn(answer) THEN e.post.sizes ELSE <<>>)} ELSE {}
      [] e.kind = "counted" ->
             IF r \in owed /\ s.post.kind = "counts" /\ answer.kind = "counts" /\ answer.sizes = e.sizes
             THEN {AfterCounted(r, s, answer)} ELSE {}
      [] e.kind = "reported" ->
             IF r \in owed /\ s.post.kind = "report" /\ answer.kind = "report" THEN {AfterReported(r, s, answer)} ELSE {}
      [] e.kind = "step_taken" ->
             IF s.queue # <<>> /\ s.taken < s.limit /\ ~s.left THEN {AfterTake(r, s)} ELSE {}
      [] e.kind = "consumer_stopped" -> {AfterStop(r, s)}
      [] e.kind = "local_failed" -> {AfterFailure(r, [s EXCEPT !.reading = 0, !.collating = None], <<>>)}
      [] e.kind = "urged" -> {AfterUrge(r, s)}
      [] e.kind = "peer_lost" -> {AfterLoss(r, s)}
      [] e.kind = "budget_accepted" -> {AfterAccept(s, e.tokens)}
      [] OTHER -> {}

\* The trace's effects are those of the step from s to t.
IsEffects(s, t) ==
    /\ e.read = CASE e.kind = "start" -> t.reading [] s.phase = "offer" /\ t.phase = "count" -> t.reading [] OTHER -> 0
    /\ e.delivered = Numbers(s.taken + Len(s.queue), t.taken + Len(t.queue) - (s.taken + Len(s.queue)))
    /\ e.collate = IF e.kind = "counted" THEN <<s.round, s.planned>> \o t.plan ELSE <<>>
    /\ IF t.post = s.post \/ t.post = NoPost THEN e.post = NoPost
       ELSE CASE t.post.kind = "offer" -> IsSameOffer(t, t.post, e.post)
              [] t.post.kind = "counts" -> e.post = t.post
              [] OTHER -> e.post = t.post
    /\ e.finish = IF t.phase = "done" /\ s.phase # "done" THEN <<t.outcome.kind, t.outcome.rank, t.limit>> ELSE <<>>

Follow ==
    /\ at <= Len(Trace)
    /\ LET r == e.rank
           s == rank[r]
       IN \E t \in Outcomes(r, s) :
              /\ IsEffects(s, t)
              /\ LET posted == IF e.post.kind = "offer" THEN [t EXCEPT !.post = e.post] ELSE t
                     rest == IF e.kind \in {"agreed", "counted", "reported"} THEN owed \ {r} ELSE owed
                     given == IF t.round + 1 <= Len(Given) THEN Given[t.round + 1] ELSE None
                 IN SettleOn([rank EXCEPT ![r] = posted], rest, ops, given)
    /\ at' = at + 1
    /\ UNCHANGED <<failures, stops, losses>>
Finished == at > Len(Trace) /\ UNCHANGED <<vars, at>>

TraceSpec == Init /\ at = 1 /\ [][Follow \/ Finished]_<<vars, at>>
\* The model's own invariants, checked on the recorded run.
Kept == NoError /\ StepsAgree /\ Numbered /\ Conserve /\ Cover /\ QuotaEnd /\ ReleaseTogether /\ Bounded /\ BudgetsAgree
=============================================================================
