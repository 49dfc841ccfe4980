-------------------------------- MODULE Dgap --------------------------------
(* The coupled system of protocol.md: loaders (R5), exchange, collation, bounded queues, and trainers with a collective in
   every step. Samples are abstract: all have length 1 and a group holds at most Cap of them, so a rank's window is a number
   and a group is its size (0 for idle). Everything else is as in the code. With the same bounds the reachable graph equals
   that of `odb-ref explore` (tests/tla/test_same_graph.py).

   A rank is a record of the core's state and of its driver's: reading, collating, post, left, told, lost, gone, loaderless.
   Variant is "none", or names a planted defect that some configuration must refute. *)
EXTENDS Integers, Sequences, FiniteSets

CONSTANTS
    Shard,        \* the number of samples of each rank: a sequence
    Cap,          \* samples in a full group: the largest token budget
    Window, Ramp, \* R2.3
    Depth,        \* of each rank's queue: a sequence
    Age,          \* R4.3
    Mode, Quota,  \* "join" or "quota"; Quota is 0 if there is none
    Rule,         \* "odb", "paper", or "any": any target within the bounds of R3.3, chosen anew in each round
    MaxFailures, MaxStops, MaxLosses,
    IsSingleReads, IsEagerEnd,  \* how a source answers: sample by sample, and whether it reports its end with its last sample
    IsLeftInside, \* whether a consumer may also leave in the middle of a step, whose collective then never ends
    Urging,       \* "left": a rank may be urged at any moment after another's consumer left; "always"; "never"
    MaxLostLoaders, \* the number of ranks that may lose the process that reads and collates for them
    WindowBytes,  \* the number of samples that a window may hold if it is bounded in bytes (R2.3), one byte each; else 0
    IsDrawn,      \* whether all ranks draw from one common order (R14), which has all shards' places together, counted from 0
    UpdateSamples, \* the number of samples in an optimizer update (R16); 0 for the free mode
    Accepted,     \* the budgets that each rank accepts in turn, each from any moment on (R15): a sequence of sequences
    Variant

VARIABLES
    rank,         \* a record for each rank
    answer,       \* of the last exchange, as long as some rank has not received it
    owed,         \* the ranks that have not received it
    failures, stops, losses,  \* how many faults have happened
    ops           \* only in the variant "shared_communicator": the operations that each rank has issued and not completed

vars == <<rank, answer, owed, failures, stops, losses, ops>>

Ranks == 1..Len(Shard)
None == 1000000000
NoPost == [kind |-> "none"]
NoOutcome == [kind |-> "none", rank |-> None]
Ending == {"drain", "done"}

Min(S) == CHOOSE x \in S : \A y \in S : x <= y
Max(S) == CHOOSE x \in S : \A y \in S : x >= y
RECURSIVE Sum(_)
Sum(s) == IF s = <<>> THEN 0 ELSE Head(s) + Sum(Tail(s))
Ceil(a, b) == (a + b - 1) \div b
Repeat(x, n) == [i \in 1..n |-> x]
MinMax(S) == <<Min(S), Max(S)>>
RECURSIVE Halve(_, _)
Halve(x, n) == IF n = 0 THEN x ELSE Halve(x \div 2, n - 1)

(* ---- R2 to R4: windows, groups, offers, targets, alignment --------------------------------------------------------- *)

\* R16.3, R16.4: the number of rounds in an update. Only the last of them forms steps. In the free mode every round does.
IsUpdate == UpdateSamples > 0
RECURSIVE Digits(_)
Digits(n) == IF n = 0 THEN 0 ELSE 1 + Digits(n \div 3)
UpdateRounds ==
    IF ~IsUpdate THEN 1 ELSE 1 + IF IsDrawn THEN Min({5, Digits(UpdateSamples \div Cardinality(Ranks))}) ELSE 1
HasSteps(k) == (k + 1) % UpdateRounds = 0
\* R16.2: the number of places of a rank's own source that lie before an update.
FirstPlace(r, update) == Ceil(update * UpdateSamples - (r - 1), Cardinality(Ranks))
WindowSize(r, k) ==
    LET update == k \div UpdateRounds
    IN IF ~IsUpdate THEN Max({1, Halve(Window, Max({0, Ramp - k}))})
       ELSE IF HasSteps(k) THEN FirstPlace(r, update + 1) - FirstPlace(r, update) ELSE 0
\* Samples all have length 1, so there is no padding. Groups are formed under the budget in force.
Groups(s, samples) == IF HasSteps(s.round) THEN Ceil(samples, s.agreed) ELSE 0
\* R3.1: all groups, or all but one (but at least one) if the last and smallest has less than half of the budget in force.
GroupsToEmit(s) ==
    LET n == Groups(s, s.held)
        isKept == 2 * (s.held - (n - 1) * s.agreed) < s.agreed /\ (n > 1 \/ (n = 1 /\ Variant = "only_group_kept"))
    IN IF isKept THEN n - 1 ELSE n
\* Samples are all alike, so the oldest are emitted first, and the rank holds the newest that it has read.
DueSamples(s) == IF ~IsUpdate /\ Len(s.marks) = Age THEN Max({0, s.marks[1] - (s.read - s.held)}) ELSE 0
IsQuotaMet(s) == Quota > 0 /\ s.global >= Quota
OfferedSamples(s) ==
    IF IsQuotaMet(s) \/ (Variant = "idle_uses_slot" /\ s.slots <= 0) THEN 0
    ELSE IF IsUpdate /\ ~s.ended THEN Max({1, s.held}) ELSE s.held

Offer(r, s, isReady) ==
    [kind |-> "offer", round |-> s.round, ready |-> IF isReady THEN 1 ELSE 0,
     failed |-> IF s.failed THEN r ELSE None,
     stop |-> IF s.stopped THEN r ELSE None,
     step |-> IF s.stopped THEN s.taken ELSE None,
     samples |-> OfferedSamples(s),
     reading |-> IF s.ended \/ IsUpdate THEN None ELSE GroupsToEmit(s),
     groups |-> Groups(s, s.held),
     due |-> Groups(s, DueSamples(s)),
     budget |-> s.accepted]

LowerToQuota(T, least) == IF Mode = "quota" /\ T # None /\ ~IsUpdate THEN Min({T, least}) ELSE T
IsClosing(most, least, isAllEnded) ==
    \/ most = 0 /\ (Variant \in {"idle_uses_slot", "windows_by_time"} => isAllEnded)
    \/ least = 0 /\ (Mode = "quota" \/ Variant = "close_on_first_dry")

\* The agreements that a set of offers may lead to: one or, with the rule "any", one for each target within the bounds. A
\* given target, as from a trace, is taken if it is within the bounds.
Agreements(posts, given) ==
    LET field(name) == {p[name] : p \in posts}
        samples == MinMax(field("samples"))
        most == Max(field("groups"))
        least == Min(field("reading"))
        due == Max(field("due"))
        low == Max({1, due, IF IsUpdate THEN most ELSE 0})
        odb == Max({due, IF least = None THEN most ELSE least})
        \* In a round of the ramp, while some source has not ended, a quarter.
        isRamp == Min(field("round")) < Ramp /\ least # None /\ ~IsUpdate
        Held(T) == IF isRamp THEN Max({1, due, T \div 4}) ELSE T
        isPlain == Min(field("failed")) = None /\ Min(field("stop")) = None /\ Min(field("ready")) = 1
        targets == IF ~isPlain THEN {None}
                   ELSE IF IsClosing(samples[2], samples[1], least = None) \/ (IsUpdate /\ most = 0) THEN {0}
                   ELSE IF Variant = "update_slips" THEN {Max({1, Min(field("groups"))})}
                   ELSE IF given # None
                        THEN {given} \cap ((low..samples[2]) \union IF Mode = "quota" THEN {samples[1]} ELSE {})
                   ELSE CASE Rule = "any" -> {Held(T) : T \in low..samples[2]}
                          [] Rule = "odb" -> {Held(odb)}
                          [] Rule = "paper" -> {Held(most)}
    IN {[kind |-> "offer", failed |-> Min(field("failed")), stop |-> Min(field("stop")), step |-> Min(field("step")),
         ready |-> Min(field("ready")), samples |-> samples, reading |-> least, groups |-> most, due |-> due,
         budget |-> Min(field("budget")), target |-> IF T = 0 THEN 0 ELSE LowerToQuota(T, samples[1])] : T \in targets}

\* The sizes, falling, when the largest group is halved until there are n groups, or only single samples (R4.2).
RECURSIVE Insert(_, _)
Insert(x, s) == IF s = <<>> THEN <<x>> ELSE IF x > Head(s) THEN <<x>> \o s ELSE <<Head(s)>> \o Insert(x, Tail(s))
RECURSIVE Split(_, _)
Split(sizes, n) ==
    IF sizes = <<>> \/ Len(sizes) >= n \/ Head(sizes) <= 1 THEN sizes
    ELSE Split(Insert(Ceil(Head(sizes), 2), Insert(Head(sizes) \div 2, Tail(sizes))), n)
Align(s, T) ==
    LET n == Groups(s, s.held)
        sizes == IF n = 0 THEN <<>> ELSE Repeat(s.agreed, n - 1) \o <<s.held - (n - 1) * s.agreed>>
        cut == IF n > T THEN SubSeq(sizes, 1, T) ELSE Split(sizes, T)
    IN cut \o Repeat(0, T - Len(cut))

(* ---- R14: shared shards. Samples all have length 1, so what is carried counts by its number. ------------------------ *)

Total == Sum(Shard)
\* R14.3: each gets what it wants of what is left or, if that is too little, all keep the same room but for one place, by rank.
Shares(wants, left) ==
    LET short(v) == [q \in Ranks |-> Max({0, wants[q] - v})]
        v == Min({u \in 0..Max({wants[q] : q \in Ranks}) : Sum(short(u)) <= left})
        spare == left - Sum(short(v))
        before(q) == Cardinality({p \in Ranks : p < q /\ wants[p] >= v})
    IN IF Sum(wants) <= left THEN wants
       ELSE [q \in Ranks |-> short(v)[q] + IF wants[q] >= v /\ before(q) < spare THEN 1 ELSE 0]
\* How much the rank's driver starts to read: nothing if the process that reads is lost.
Reads(s, n) == IF s.loaderless THEN 0 ELSE n
\* R16.4: the portion of an update that is drawn for round k, shared out so that the lightest ranks are filled to one level.
PortionShares(drawn, k, loads) ==
    LET begin == Min({Total, (k \div UpdateRounds) * UpdateSamples})
        left == Min({begin + UpdateSamples, Total}) - drawn
        portion == IF HasSteps(k) THEN left ELSE Ceil(2 * left, 3)
        held == [q \in Ranks |-> IF Sum(loads) = 0 THEN 0 ELSE (loads[q] * (drawn - begin)) \div Sum(loads)]
    IN Shares([q \in Ranks |-> Max({held[p] : p \in Ranks}) + portion - held[q]], portion)
\* The rank's part of what is drawn for round k, which follows the parts of lower ranks, and the start of its read.
AfterDraw(r, s, k, wants) ==
    LET shares == IF IsUpdate THEN PortionShares(s.draw[3], k, wants) ELSE Shares(wants, Total - s.draw[3])
        lower == IF Variant = "alike_draws" /\ s.draw[3] > 0 THEN 0 ELSE Sum(SubSeq(shares, 1, r - 1))
        first == s.draw[3] + lower
        end == s.draw[3] + Sum(shares)
    IN [s EXCEPT !.draw = <<first, shares[r], end>>, !.places = @ \o [i \in 1..shares[r] |-> first + i - 1],
                 !.ended = end = Total, !.wanted = shares[r], !.reading = Reads(s, shares[r])]
\* The number of samples in the rank's source, as far as the rank knows.
Readable(r, s) == IF IsDrawn THEN Len(s.places) ELSE Shard[r]

(* ---- R5: one rank. Each operator takes a record and gives a record. ------------------------------------------------- *)

Idling(r) ==
    [phase |-> "fill", round |-> 0, read |-> 0, ended |-> FALSE, wanted |-> WindowSize(r, 0), held |-> 0, marks |-> <<>>,
     aligned |-> <<>>, plan |-> <<>>, collated |-> TRUE, planned |-> 0, global |-> 0, released |-> <<>>, queue |-> <<>>,
     taken |-> 0, got |-> 0, failed |-> FALSE, stopped |-> FALSE, urged |-> FALSE, limit |-> None, outcome |-> NoOutcome,
     reading |-> WindowSize(r, 0), collating |-> None, post |-> NoPost, causes |-> <<>>, left |-> FALSE, inside |-> FALSE, told |-> FALSE,
     lost |-> FALSE, gone |-> FALSE, agreed |-> Cap, accepted |-> Cap, coming |-> Accepted[r], draw |-> <<0, 0, 0>>, places |-> <<>>, loaderless |-> FALSE, slots |-> IF Variant = "idle_uses_slot" THEN Shard[r] ELSE 0]

PostWhenReady(r, s) ==
    LET isReady == s.collated /\ s.wanted = 0
        mayPost == isReady /\ (s.urged \/ s.released = <<>> \/ s.plan = <<>>)
        mustEnd == s.failed \/ s.stopped
    IN IF s.phase # "fill" \/ (~mayPost /\ ~mustEnd) THEN s
       ELSE [s EXCEPT !.phase = "offer", !.post = Offer(r, s, isReady)]

\* With shared shards each rank first wants a whole window, and one that gets nothing offers at once. With updates all do.
Fresh(r) ==
    IF IsUpdate THEN PostWhenReady(r, Idling(r))
    ELSE IF IsDrawn THEN PostWhenReady(r, AfterDraw(r, Idling(r), 0, [q \in Ranks |-> WindowSize(q, 0)]))
    ELSE Idling(r)

\* R6.6. Steps are numbered without a gap, so the released ones begin at taken + queued.
DeliverNow(r, s) ==
    LET room == Min({Depth[r] - Len(s.queue), Len(s.released), s.limit - (s.taken + Len(s.queue))})
        n == Max({0, room})
    IN [s EXCEPT !.queue = @ \o SubSeq(s.released, 1, n), !.released = SubSeq(s.released, n + 1, Len(s.released))]

FinishWhenDrained(s) ==
    IF s.released # <<>> /\ s.taken + Len(s.queue) < s.limit THEN s ELSE [s EXCEPT !.phase = "done"]

DrainTo(r, s, outcome, limit) ==
    FinishWhenDrained(DeliverNow(r, [s EXCEPT !.phase = "drain", !.outcome = outcome, !.limit = Min({@, limit})]))

Outcome(kind, who) == [kind |-> kind, rank |-> who]

AfterReadOf(r, s, n, isEnded, isFull) ==
    LET left == IF isEnded \/ isFull THEN 0 ELSE s.reading - n
    IN PostWhenReady(r, [s EXCEPT !.read = @ + n, !.held = @ + n, !.ended = IF IsDrawn THEN @ ELSE isEnded, !.reading = left,
                                  !.wanted = IF isEnded \/ isFull THEN 0 ELSE @ - n])

AfterRead(r, s) ==
    LET asked == IF IsSingleReads THEN Min({1, s.reading}) ELSE s.reading
        there == Min({asked, Readable(r, s) - s.read})
        n == IF WindowBytes = 0 THEN there ELSE Min({there, Max({WindowBytes - s.held, IF s.held = 0 THEN 1 ELSE 0})})
        isFull == n < there
    IN AfterReadOf(r, s, n, IF IsEagerEnd THEN s.read + n = Readable(r, s) ELSE ~isFull /\ n < asked, isFull)

\* Only in variants: windows are cut by time. What has not been read yet is read for the next window.
AfterEarlyPost(r, s) == [s EXCEPT !.phase = "offer", !.wanted = 0, !.reading = 0, !.post = Offer(r, s, TRUE)]

Release(s) == [s EXCEPT !.released = @ \o s.plan, !.plan = <<>>]

AfterCollate(r, s) ==
    LET ready == [s EXCEPT !.collating = None, !.collated = TRUE]
    IN PostWhenReady(r, IF Variant = "release_early" THEN DeliverNow(r, Release(ready)) ELSE ready)

Aligned(s, T) ==
    IF Variant = "idle_uses_slot" /\ s.slots < T
    THEN Align(s, Max({0, s.slots})) \o Repeat(0, T - Max({0, s.slots}))
    ELSE Align(s, T)
\* A round of an update may have no step and still not close the epoch.
Closes(a) == a.target = 0 /\ (IsUpdate => IsClosing(a.samples[2], a.samples[1], a.reading = None))
IsGoingOn(a) == a.failed = None /\ a.stop = None /\ a.ready = 1 /\ ~Closes(a)

\* `aligned` matters only if the agreement is one to go on.
AfterAgreed(r, before, a, aligned) ==
    LET s == [before EXCEPT !.post = NoPost]
        advanced == IF Variant = "release_early" THEN s ELSE Release(s)
        carried == s.held - Sum(aligned)
        room == IF s.ended THEN 0
                ELSE IF IsUpdate /\ IsDrawn THEN carried ELSE Max({0, WindowSize(r, s.round + 1) - carried})
        wanted == IF IsDrawn THEN 0 ELSE room
        counts == IF IsDrawn THEN [kind |-> "counts", sizes |-> aligned, want |-> room] ELSE [kind |-> "counts", sizes |-> aligned]
        marks == Append(s.marks, s.read)
        n == Len(marks)
    IN CASE a.failed # None -> [s EXCEPT !.phase = "report", !.post = [kind |-> "report", failed |-> s.failed]]
         [] a.failed = None /\ a.stop # None -> DrainTo(r, s, Outcome("stopped", a.stop), a.step)
         [] a.failed = None /\ a.stop = None /\ a.ready = 0 -> [s EXCEPT !.phase = "error"]
         [] a.failed = None /\ a.stop = None /\ a.ready = 1 /\ Closes(a) ->
                DrainTo(r, advanced, Outcome("complete", None), s.planned)
         [] OTHER ->
                DeliverNow(r, [advanced EXCEPT !.phase = "count", !.wanted = wanted, !.reading = Reads(s, wanted),
                    !.held = carried, !.aligned = aligned,
                    !.agreed = IF Variant = "own_budget" THEN s.accepted ELSE a.budget,
                    !.slots = IF Variant = "idle_uses_slot" THEN @ - Len(aligned) ELSE @,
                    !.marks = IF n > Age THEN SubSeq(marks, n - Age + 1, n) ELSE marks,
                    !.post = counts])

RECURSIVE StepsToQuota(_, _)
StepsToQuota(total, sizes) ==
    IF sizes = <<>> THEN 0
    ELSE IF total + Head(sizes) >= Quota THEN 1
    ELSE 1 + StepsToQuota(total + Head(sizes), Tail(sizes))

AfterCounted(r, before, a) ==
    LET n == IF Quota > 0 THEN StepsToQuota(before.global, a.sizes) ELSE Len(a.sizes)
        plan == SubSeq(before.aligned, 1, n)
        next == before.round + 1
        isDrawing == IsDrawn /\ ~before.ended /\ ~(IsUpdate /\ next % UpdateRounds = 0)
        s == IF isDrawing THEN AfterDraw(r, before, next, a.wants) ELSE before
    IN PostWhenReady(r, [s EXCEPT !.post = NoPost, !.phase = "fill", !.round = @ + 1, !.aligned = <<>>,
            !.held = @ + Sum(before.aligned) - Sum(plan), !.plan = plan,
            !.collated = FALSE, !.collating = IF before.loaderless THEN None ELSE before.round, !.planned = @ + n, !.global = @ + Sum(SubSeq(a.sizes, 1, n))])

AfterReported(r, before, a) ==
    DrainTo(r, [before EXCEPT !.post = NoPost], Outcome("failed", a.first), before.planned - Len(before.plan))

AfterTake(r, s) ==
    LET taken == DeliverNow(r, [s EXCEPT !.queue = Tail(@), !.taken = @ + 1, !.got = @ + Head(s.queue)])
    IN IF taken.phase = "drain" THEN FinishWhenDrained(taken) ELSE PostWhenReady(r, taken)

AfterStop(r, before) ==
    LET s == [before EXCEPT !.left = TRUE]
        stopped == [s EXCEPT !.stopped = TRUE, !.limit = Min({@, s.taken})]
    IN IF s.phase = "done" THEN s
       ELSE IF s.phase = "drain" THEN FinishWhenDrained(stopped)
       ELSE PostWhenReady(r, stopped)

AfterFailure(r, s, cause) ==
    LET noted == [s EXCEPT !.causes = Append(@, cause)]
    IN IF s.phase \in Ending \/ s.failed THEN noted
       ELSE IF Variant = "no_failure_agreement"
            THEN [noted EXCEPT !.failed = TRUE, !.phase = "done", !.limit = s.taken, !.outcome = Outcome("failed", r)]
       ELSE PostWhenReady(r, [noted EXCEPT !.failed = TRUE])

AfterUrge(r, s) ==
    LET told == [s EXCEPT !.told = TRUE]
    IN IF s.phase \in Ending THEN told ELSE PostWhenReady(r, [told EXCEPT !.urged = TRUE])

AfterLoss(r, s) ==
    LET lost == [s EXCEPT !.lost = TRUE]
    IN IF s.phase \in Ending THEN lost
       ELSE [lost EXCEPT !.phase = "done", !.outcome = Outcome("lost", None), !.limit = Min({@, s.taken}),
                         !.aligned = <<>>, !.held = @ + Sum(s.aligned)]

(* ---- The exchange: it answers once all ranks have posted; each rank gets the answer at any later moment. ------------ *)

Posts(ranks) == {ranks[r].post : r \in Ranks}
Answers(ranks, given) ==
    LET kinds == {p.kind : p \in Posts(ranks)}
        kind == CHOOSE k \in kinds : TRUE
        sizes(r) == ranks[r].post.sizes
    IN IF Cardinality(kinds) > 1 THEN {[kind |-> "mixed"]}
       ELSE CASE kind = "offer" ->
                   IF Cardinality({p.round : p \in Posts(ranks)}) > 1 THEN {[kind |-> "mixed"]}
                   ELSE Agreements(Posts(ranks), given)
              [] kind = "counts" ->
                   IF Cardinality({Len(sizes(r)) : r \in Ranks}) > 1 THEN {[kind |-> "mixed"]}
                   ELSE LET sums == [i \in 1..Len(sizes(1)) |-> Sum([r \in Ranks |-> sizes(r)[i]])]
                        IN {IF IsDrawn
                            THEN [kind |-> "counts", sizes |-> sums, wants |-> [r \in Ranks |-> ranks[r].post.want]]
                            ELSE [kind |-> "counts", sizes |-> sums]}
              [] kind = "report" -> {[kind |-> "report", first |-> Min({r \in Ranks : ranks[r].post.failed})]}

IsShared == Variant = "shared_communicator"
\* On a shared communicator operations complete in the order in which each rank has issued them.
IsExchangeNext(o) == IsShared => \A r \in Ranks : o[r] # <<>> /\ Head(o[r]) = "exchange"
Pop(o) == IF IsShared THEN [r \in Ranks |-> Tail(o[r])] ELSE o

\* Makes `ranks` the state of the ranks. `rest` are still owed the present answer, and `issued` is on the communicator.
SettleOn(ranks, rest, issued, given) ==
    /\ rank' = ranks
    /\ IF rest = {} /\ (\A r \in Ranks : ranks[r].post # NoPost) /\ IsExchangeNext(issued)
       THEN /\ answer' \in Answers(ranks, given)
            /\ owed' = Ranks
            /\ ops' = Pop(issued)
       ELSE /\ answer' = IF rest = {} THEN NoPost ELSE answer
            /\ owed' = rest
            /\ ops' = issued
Settle(ranks, rest, issued) == SettleOn(ranks, rest, issued, None)

\* `issued`, with the exchange that rank r joins when it becomes s.
Issue(issued, r, s) ==
    IF IsShared /\ s.post # NoPost /\ rank[r].post # s.post THEN [issued EXCEPT ![r] = Append(@, "exchange")] ELSE issued
Become(r, s) == Settle([rank EXCEPT ![r] = s], owed, Issue(ops, r, s))

(* ---- What can happen ----------------------------------------------------------------------------------------------- *)

IsLive(r) == ~rank[r].gone /\ rank[r].phase # "done"
HasStep(s) == s.queue # <<>> /\ (s.phase = "done" => s.taken < s.limit)
\* The number of steps whose collectives a consumer has entered: all it has taken, except one in the middle of which it left.
Entered(s) == IF s.inside THEN s.taken - 1 ELSE s.taken
Least == Min({Entered(rank[r]) : r \in Ranks})
\* A trainer is between steps once every trainer has entered the collective of the last step it took.
IsBetweenSteps(r) == IF IsShared THEN \A i \in 1..Len(ops[r]) : ops[r][i] # "model" ELSE rank[r].taken = Least
Read(r) == IsLive(r) /\ rank[r].reading > 0 /\ Become(r, AfterRead(r, rank[r])) /\ UNCHANGED <<failures, stops, losses>>
Collate(r) ==
    IsLive(r) /\ rank[r].collating # None /\ Become(r, AfterCollate(r, rank[r])) /\ UNCHANGED <<failures, stops, losses>>
Answer(r) ==
    /\ IsLive(r) /\ r \in owed /\ rank[r].post # NoPost
    /\ LET aligned == IF answer.kind = "offer" /\ IsGoingOn(answer) THEN Aligned(rank[r], answer.target) ELSE <<>>
           s == CASE answer.kind = "offer" -> AfterAgreed(r, rank[r], answer, aligned)
                  [] answer.kind = "counts" -> AfterCounted(r, rank[r], answer)
                  [] answer.kind = "report" -> AfterReported(r, rank[r], answer)
                  [] OTHER -> [rank[r] EXCEPT !.phase = "error"]
       IN Settle([rank EXCEPT ![r] = s], owed \ {r}, Issue(ops, r, s))
    /\ UNCHANGED <<failures, stops, losses>>
Take(r) ==
    /\ ~rank[r].gone /\ ~rank[r].left /\ HasStep(rank[r]) /\ IsBetweenSteps(r)
    /\ LET s == AfterTake(r, rank[r])
           entered == IF IsShared THEN [ops EXCEPT ![r] = Append(@, "model")] ELSE ops
       IN Settle([rank EXCEPT ![r] = s], owed, Issue(entered, r, s))
    /\ UNCHANGED <<failures, stops, losses>>
\* Only on a shared communicator: the collective of a step completes once every rank has it at the head.
Reduce ==
    /\ IsShared /\ \A r \in Ranks : ops[r] # <<>> /\ Head(ops[r]) = "model"
    /\ Settle(rank, owed, Pop(ops)) /\ UNCHANGED <<failures, stops, losses>>
Stop(r) ==
    /\ ~rank[r].gone /\ ~rank[r].left /\ (HasStep(rank[r]) \/ rank[r].phase # "done")
    /\ stops < MaxStops /\ IsBetweenSteps(r)
    /\ stops' = stops + 1 /\ Become(r, AfterStop(r, rank[r])) /\ UNCHANGED <<failures, losses>>
IsUrgent(r) ==
    /\ IsLive(r) /\ ~rank[r].told
    /\ Urging = "always" \/ (Urging = "left" /\ \E o \in Ranks \ {r} : rank[o].left)
\* Only while no other trainer has gone on to the next step: otherwise this step is over.
Abandon(r) ==
    /\ IsLeftInside /\ ~rank[r].gone /\ ~rank[r].left /\ rank[r].taken > 0 /\ (HasStep(rank[r]) \/ rank[r].phase # "done")
    /\ stops < MaxStops /\ \A o \in Ranks : rank[o].taken <= rank[r].taken
    /\ stops' = stops + 1 /\ Become(r, AfterStop(r, [rank[r] EXCEPT !.inside = TRUE])) /\ UNCHANGED <<failures, losses>>
Urge(r) ==
    /\ IsUrgent(r)
    /\ Become(r, AfterUrge(r, rank[r])) /\ UNCHANGED <<failures, stops, losses>>
FailRead(r) ==
    /\ IsLive(r) /\ rank[r].reading > 0 /\ failures < MaxFailures /\ failures' = failures + 1
    /\ Become(r, AfterFailure(r, [rank[r] EXCEPT !.reading = 0], <<"read", rank[r].read>>)) /\ UNCHANGED <<stops, losses>>
FailCollate(r) ==
    /\ IsLive(r) /\ rank[r].collating # None /\ failures < MaxFailures /\ failures' = failures + 1
    /\ Become(r, AfterFailure(r, [rank[r] EXCEPT !.collating = None], <<"collate", rank[r].collating>>))
    /\ UNCHANGED <<stops, losses>>
Die(r) ==
    /\ IsLive(r) /\ losses < MaxLosses /\ losses' = losses + 1
    /\ Become(r, [rank[r] EXCEPT !.gone = TRUE]) /\ UNCHANGED <<failures, stops>>
Lose(r) ==
    /\ IsLive(r) /\ ~rank[r].lost /\ \E o \in Ranks \ {r} : rank[o].gone
    /\ Become(r, AfterLoss(r, rank[r])) /\ UNCHANGED <<failures, stops, losses>>
\* The process that reads and collates is gone: a failure, possible at any moment. No read or collation completes from now on.
LoseLoader(r) ==
    /\ IsLive(r) /\ ~rank[r].loaderless /\ Cardinality({o \in Ranks : rank[o].loaderless}) < MaxLostLoaders
    /\ LET s == [rank[r] EXCEPT !.loaderless = TRUE, !.reading = 0, !.collating = None]
       IN Become(r, IF Variant = "silent_loader" THEN s ELSE AfterFailure(r, s, <<"loader", 0>>))
    /\ UNCHANGED <<failures, stops, losses>>
\* R5.11: from now on the rank accepts another budget, and offers it in its next offer.
AfterAccept(s, budget) == [s EXCEPT !.accepted = Min({Cap, budget})]
Accept(r) ==
    /\ IsLive(r) /\ rank[r].coming # <<>>
    /\ Become(r, AfterAccept([rank[r] EXCEPT !.coming = Tail(@)], Head(rank[r].coming)))
    /\ UNCHANGED <<failures, stops, losses>>
PostEarly(r) ==
    /\ Variant \in {"idle_uses_slot", "windows_by_time"}
    /\ rank[r].phase = "fill" /\ rank[r].collated /\ rank[r].wanted > 0 /\ rank[r].released = <<>>
    /\ \E o \in Ranks \ {r} : rank[o].post.kind = "offer" /\ rank[o].post.samples > 0
    /\ Become(r, AfterEarlyPost(r, rank[r])) /\ UNCHANGED <<failures, stops, losses>>

(* ---- Ends ---------------------------------------------------------------------------------------------------------- *)

IsOver(s) == s.gone \/ s.phase = "done"
\* A consumer waits, in the collective of a step, for one that has left or is gone. No loader can help it.
IsStranding == \E r \in Ranks : rank[r].gone \/ (rank[r].left /\ Entered(rank[r]) = Least)
\* NP2: the rank was told of no stop, because the last agreement came before it, or was told of a failure, which takes
\* precedence. It still has steps for its stranded consumer.
IsStrandedInDrain(s) == s.phase = "drain" /\ s.outcome.kind \in {"complete", "failed"} /\ ~s.left /\ s.taken > Least
IsFinal ==
    /\ \A r \in Ranks : IsOver(rank[r]) \/ (IsStranding /\ IsStrandedInDrain(rank[r]))
    /\ IsStranding \/ \A r \in Ranks : rank[r].taken = Least /\ (HasStep(rank[r]) => rank[r].left)
\* A final state repeats, so that TLC reports only real deadlocks.
End == IsFinal /\ UNCHANGED vars

Init ==
    /\ rank = [r \in Ranks |-> Fresh(r)]
    /\ LET isPosted == \A r \in Ranks : rank[r].post # NoPost  \* with updates all have, because nothing is read for their first round
       IN /\ answer \in IF isPosted THEN Answers(rank, None) ELSE {NoPost}
          /\ owed = IF isPosted THEN Ranks ELSE {}
    /\ failures = 0 /\ stops = 0 /\ losses = 0
    /\ ops = [r \in Ranks |-> <<>>]
Next ==
    \/ \E r \in Ranks : Read(r)
    \/ \E r \in Ranks : Collate(r)
    \/ \E r \in Ranks : Answer(r)
    \/ \E r \in Ranks : Take(r)
    \/ \E r \in Ranks : Stop(r)
    \/ \E r \in Ranks : Abandon(r)
    \/ \E r \in Ranks : Urge(r)
    \/ \E r \in Ranks : FailRead(r)
    \/ \E r \in Ranks : FailCollate(r)
    \/ \E r \in Ranks : Die(r)
    \/ \E r \in Ranks : Lose(r)
    \/ \E r \in Ranks : LoseLoader(r)
    \/ \E r \in Ranks : Accept(r)
    \/ \E r \in Ranks : PostEarly(r)
    \/ Reduce
    \/ End
Spec == Init /\ [][Next]_vars

\* Something can happen that is neither a fault nor a needless urge. Those may happen but need not, so they do not count.
CanGoOn ==
    \E r \in Ranks :
        \/ IsLive(r) /\ (rank[r].reading > 0 \/ rank[r].collating # None \/ (r \in owed /\ rank[r].post # NoPost))
        \/ ~rank[r].gone /\ ~rank[r].left /\ HasStep(rank[r]) /\ IsBetweenSteps(r)
        \/ IsUrgent(r) /\ \E o \in Ranks \ {r} : rank[o].left
        \/ IsShared /\ \A o \in Ranks : ops[o] # <<>> /\ Head(ops[o]) = "model"
        \/ IsLive(r) /\ ~rank[r].lost /\ \E o \in Ranks \ {r} : rank[o].gone
\* Weak fairness of everything that CanGoOn lists, written out because TLC evaluates ENABLED far more slowly.
GoesOn ==
    /\ <<failures, stops, losses>>' = <<failures, stops, losses>> /\ rank' # rank
    /\ \A r \in Ranks : rank'[r].loaderless = rank[r].loaderless
FairSpec == Spec /\ ([]<>~CanGoOn \/ []<><<GoesOn>>_vars)

(* ---- Properties, by the ids of properties.md ----------------------------------------------------------------------- *)

Formed(s) == Sum(s.aligned) + Sum(s.plan) + Sum(s.released) + Sum(s.queue)
Released(s) == s.planned - Len(s.plan)
Ready(s) == IF s.collated THEN s.planned ELSE Released(s)
Steps(s) == s.plan \o s.released \o s.queue

NotStuck == CanGoOn \/ IsFinal
NoError == \A r \in Ranks : rank[r].phase # "error"
StepsAgree ==
    \A r, o \in Ranks :
        /\ rank[r].round - rank[o].round \in {-1, 0, 1}
        /\ rank[r].round = rank[o].round => rank[r].planned = rank[o].planned /\ rank[r].global = rank[o].global
Lockstep == \A r, o \in Ranks : rank[r].taken - rank[o].taken \in {-1, 0, 1}
Numbered == \A r \in Ranks : rank[r].planned = rank[r].taken + Len(Steps(rank[r]))
Conserve == \A r \in Ranks : rank[r].read = rank[r].held + Formed(rank[r]) + rank[r].got
Cover ==
    \A r \in Ranks : Mode = "join" /\ rank[r].outcome.kind = "complete" =>
        rank[r].ended /\ rank[r].read = Readable(r, rank[r]) /\ rank[r].held = 0
QuotaEnd ==
    Mode = "quota" =>
        /\ \A r \in Ranks : \A i \in 1..Len(Steps(rank[r])) : Steps(rank[r])[i] > 0
        /\ (\A r \in Ranks : rank[r].outcome.kind = "complete") =>
               \/ Quota > 0 /\ rank[1].global >= Quota
               \/ \E r \in Ranks : rank[r].ended /\ rank[r].read = Readable(r, rank[r]) /\ rank[r].held = 0
ReleaseTogether == \A r, o \in Ranks : Released(rank[r]) <= Ready(rank[o])
Abort ==
    LET told == {rank[r].outcome : r \in Ranks} \ {NoOutcome, Outcome("lost", None)}
    IN Cardinality(told) <= 1
Bounded == \A r \in Ranks : Len(rank[r].queue) <= Depth[r]
Budget == \A r \in Ranks : \A i \in 1..Len(Steps(rank[r])) : Steps(rank[r])[i] <= Cap
\* R15.3: ranks that group the same round do so under the same budget. What is agreed on in a round applies to the next.
GroupedRound(s) == IF s.phase = "count" THEN s.round + 1 ELSE s.round
BudgetsAgree ==
    \A r, o \in Ranks :
        /\ rank[r].phase \in {"fill", "offer", "count"} /\ rank[o].phase \in {"fill", "offer", "count"}
        /\ GroupedRound(rank[r]) = GroupedRound(rank[o])
        => rank[r].agreed = rank[o].agreed
\* DEAL: no place is drawn twice, by one rank or by two. In join mode each is drawn by the end. Ranks in one round know the same.
Drawn == UNION {{rank[r].places[i] : i \in 1..Len(rank[r].places)} : r \in Ranks}
Deal ==
    IsDrawn =>
        /\ Cardinality(Drawn) = Sum([r \in Ranks |-> Len(rank[r].places)]) /\ Drawn \subseteq 0..Total - 1
        /\ \A r, o \in Ranks : rank[r].round = rank[o].round =>
               rank[r].draw[3] = rank[o].draw[3] /\ rank[r].ended = rank[o].ended
        /\ (Mode = "join" /\ \E r \in Ranks : rank[r].outcome.kind = "complete") => Drawn = 0..Total - 1
\* UPDATE: the planned samples are those at the places before the present update, in whichever of its rounds a rank is. The
\* rank's window is empty when an update begins, and nothing beyond the update is read or drawn.
PlacesBefore(update) ==
    IF IsDrawn THEN Min({Total, update * UpdateSamples}) ELSE Sum([r \in Ranks |-> Min({Shard[r], FirstPlace(r, update)})])
UpdateWhole ==
    IsUpdate => \A r \in Ranks :
        LET update == rank[r].round \div UpdateRounds
        IN /\ rank[r].global = PlacesBefore(update)
           /\ rank[r].round % UpdateRounds = 0 /\ rank[r].phase \in {"fill", "offer"} => rank[r].held = 0
           /\ IF IsDrawn THEN rank[r].draw[3] <= PlacesBefore(update + 1)
              ELSE rank[r].read <= FirstPlace(r, update + 1)
\* Once a stop is agreed on, no consumer takes more than one step beyond the fewest that a stopped consumer entered.
StopLimit ==
    \A r, o \in Ranks : rank[r].outcome.kind = "stopped" /\ rank[o].left /\ Entered(rank[o]) = Least =>
        rank[r].taken <= Entered(rank[o]) + 1 /\ rank[r].limit <= rank[rank[r].outcome.rank].taken

AgeStep ==
    \A r \in Ranks :
        Mode = "join" /\ rank[r].phase = "offer" /\ rank'[r].phase = "count" /\ Len(rank[r].marks) = Age
            => rank'[r].read - rank'[r].held >= rank[r].marks[1]
AgeHolds == [][AgeStep]_vars

Weight(phase) == CASE phase = "fill" -> 4 [] phase = "offer" -> 3 [] phase \in {"count", "report"} -> 1 [] OTHER -> 0
Flag(b) == IF b THEN 1 ELSE 0
Rounds ==
    LET most == IF IsDrawn THEN Total ELSE Max({Shard[r] : r \in Ranks}) * Cardinality(Ranks)
    IN IF IsUpdate THEN (most \div UpdateSamples + 1) * UpdateRounds + 1 ELSE Total + 1
RankMeasure(r) ==
    LET s == rank[r]
    IN (IF Weight(s.phase) > 0 THEN (IF IsDrawn THEN 6 ELSE 5) * (Rounds - s.round) + Weight(s.phase) ELSE 0)
       + (Total - s.taken) + ((IF IsDrawn THEN Total ELSE Shard[r]) - s.read) + Flag(~s.ended) + Flag(s.reading > 0) + Flag(s.collating # None)
       + Flag(~s.left) + Flag(~s.told) + Flag(~s.lost) + Flag(~s.gone) + Flag(~s.loaderless)
       + Len(s.coming)
Measure == Sum([r \in Ranks |-> RankMeasure(r)])
Falls == [][0 <= Measure' /\ Measure' < Measure]_vars

EndsAtLast == <>IsFinal
=============================================================================
