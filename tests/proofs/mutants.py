"""Attacks on the proofs and their guard. Each must break the build or the audit. `python -m tests.proofs.mutants` tries all.

A mutant is a possible careless or hostile change: a false proof, a weaker statement, a stronger assumption, a definition with
another meaning, a part that is removed with every mention of it.
"""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.capture import capture

PROOFS = Path(__file__).parents[2] / "proofs"


Edit = tuple[str, str, str | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """``edits`` are (file, old text, new text). A new text of None deletes the file. ``by`` matches what refuses it."""

    name: str
    edits: tuple[Edit, ...]
    by: str
    is_quick: bool = False
    """Only little has to be checked again, so CI tries it."""


def _edit(
    name: str, file: str, old: str, new: str, by: str, *, is_quick: bool = False, more: tuple[Edit, ...] = ()
) -> Mutant:
    return Mutant(name=name, edits=((file, old, new), *more), by=by, is_quick=is_quick)


def _add(name: str, file: str, text: str, by: str) -> Mutant:
    return Mutant(name=name, edits=((file, "", text),), by=by, is_quick=True)


_LAST_ASSUMPTION = "c_print (cfg r) = c_print (cfg q) -> cfg r = cfg q }."
_NO_RANK = _LAST_ASSUMPTION.replace(" }.", ";\n  no_rank : W = 0 }.")
_REVIEWED = "is not what was reviewed"

MUTANTS = (
    # False proofs.
    _add("an axiom", "Weight.v", "Axiom easy : False.", "Axiom has no place"),
    _add("an axiom by another name", "Weight.v", "Conjecture easy : False.", "Conjecture has no place"),
    _add("an axiom behind a comment", "Weight.v", "(* (* *) *) Parameter easy : False.", "Parameter has no place"),
    _add("an axiom in a module", "Weight.v", "Module Type M. Axiom easy : False. End M.", "has no place"),
    _add("an assumption outside a section", "Weight.v", "Variable easy : False.", "outside a section"),
    _add("a gap", "Weight.v", "Lemma easy : False. Proof. Admitted.", "Admitted has no place"),
    _add("a gap inside a proof", "Weight.v", "Lemma easy : False. Proof. admit. Qed.", "admit has no place"),
    _add("a proof that calls itself", "Weight.v",
         "Unset Guard Checking.\nFixpoint easy (n : nat) : False := easy n.", "Unset has no place"),
    _add("a proof that does not say where it ends", "Weight.v",
         "Lemma easy : True. Proof. exact I. Defined.\nUnset Guard Checking.\nFixpoint f (n : nat) : False := f n.",
         "Defined has no place in a proof"),
    _add("a text from elsewhere", "Weight.v", 'Load "README.md".', "Weight.v|Load has no place"),
    _add("an axiom of a file alone", "Weight.v", "Local Axiom easy : False.", "Axiom has no place"),
    _add("a gap that a section hides", "Weight.v", "Section S. Let easy : False. Proof. Admitted. End S.", "has no place"),
    _add("a gap that a functor hides", "Weight.v",
         "Module Type M. Parameter easy : False. End M.\nModule F (X : M). Definition easy := X.easy. End F.", "has no place"),
    _add("a check that an attribute turns off", "Weight.v",
         "#[bypass_check(guard)] Fixpoint easy (n : nat) : False := easy n.", "has no place"),
    _add("a flag that turns a check off", "Weight.v", "Unset Universe Checking.", "Unset has no place"),
    _add("a flag for what is printed", "Weight.v", "Set Printing Implicit.", "Set has no place"),
    _add("an obligation that is given up", "Weight.v",
         "Program Definition easy : False := _.\nAdmit Obligations.", "has no place"),
    _add("a plugin", "Weight.v", 'Declare ML Module "coq-core.plugins.extraction".', "Declare has no place"),
    _add("an answer that goes elsewhere", "Weight.v", 'Redirect "answer" Print Assumptions nat.', "Redirect has no place"),
    _add("a file that is not of this folder", "Weight.v", "From Coq Require Import Classical.", "asked for From ODB"),
    _add("a sign that looks like another", "Weight.v", "Definition s\u0443stem := 0%nat.", "is not ASCII"),
    _add("a sign in a comment that may close it", "Weight.v", "(* \u2217) Definition easy := 0%nat. *)", "is not ASCII"),
    _add("an axiom of Coq's library", "Weight.v", "Require Import Classical.", _REVIEWED),
    Mutant(name="a theorem that rests on an axiom of Coq's library", by=f"{_REVIEWED}|rests on an axiom", is_quick=True, edits=(
        ("Weight.v", "Require Import List QArith Qfield Lia.", "Require Import List QArith Qfield Lia Classical."),
        ("Weight.v", "Theorem an_update_without_supervised_tokens_has_loss_zero :",
         "Lemma either : forall P : Prop, P \\/ ~ P.\nProof. exact classic. Qed.\n\n"
         "Theorem an_update_without_supervised_tokens_has_loss_zero :"))),
    Mutant(name="a file with a name of Coq's library", by="library has a file of that name", is_quick=True, edits=(
        ("Sorted.v", "", "Definition StronglySorted := True.\n"), ("_CoqProject", "Weight.v\n", "Weight.v\nSorted.v\n"))),
    Mutant(name="a file that Coq reads and nobody lists", by="Cannot find|not in _CoqProject", is_quick=True, edits=(
        ("Hidden.v", "", "Axiom easy : False.\n"),
        ("Weight.v", "Require Import List QArith Qfield Lia.",
         "Require Import List QArith Qfield Lia.\nFrom ODB Require Import Hidden."))),
    # Statements that only seem to say the same.
    _edit("a program that is not the model", "Extract.v", 'Extraction "extracted',
          'Extract Constant odb_rule => "(fun _ -> 1)".\nExtraction "extracted', _REVIEWED, is_quick=True),
    _edit("a program that leaves something out", "Extract.v", "draws deal_in_turn", "deal_in_turn",
          f"{_REVIEWED}|Extract.v", is_quick=True),
    _edit("a definition of the same name", "Main.v", "Section Ranks.",
          "Definition total (W : nat) (input : nat -> list sample) : nat := Termination.total W input.\n\nSection Ranks.",
          _REVIEWED, is_quick=True),
    _edit("a relation that is another on the page", "Main.v", "Section Shipped.",
          'Notation "a < b" := (a < b /\\ b <> b).\n\nSection Shipped.', f"Main.v|{_REVIEWED}", is_quick=True),
    _edit("a hypothesis of the page's section", "Main.v", "Hypothesis bounded : within_bounds rule.",
          "Hypothesis bounded : within_bounds rule.\nHypothesis quiet : W = 0.", _REVIEWED, is_quick=True, more=(
              ("Main.v", "apply (X x I).", "rewrite quiet in H. exfalso. exact (Nat.nlt_0_r r H)."),)),
    _edit("a theorem of the page that says less", "Main.v", "Theorem RELEASE : forall s r q j, reached s ->",
          "Theorem RELEASE : forall s r q j, reached s -> s = start cfg ->", f"Main.v|{_REVIEWED}", is_quick=True,
          more=(("Main.v", "Proof. intros s r q j R. exact (with_losses_release",
                 "Proof. intros s r q j R _. exact (with_losses_release"),)),
    _edit("a checker that is told to look away", "_CoqProject", "-Q . ODB", "-Q . ODB\n-arg -type-in-type",
          "_CoqProject is", is_quick=True),
    # Weaker statements.
    _edit("a theorem that is True", "Weight.v",
          "Theorem an_update_without_supervised_tokens_has_loss_zero :",
          "Theorem an_update_without_supervised_tokens_has_loss_zero : True.\nProof. exact I. Qed.\n\nLemma the_former :",
          _REVIEWED, is_quick=True),
    _edit("a theorem from a false hypothesis of its section", "Instance.v",
          "Hypothesis ok : setting_ok W cfg.", "Hypothesis ok : setting_ok W cfg.\nHypothesis absurd : 0 = 1.",
          _REVIEWED, is_quick=True,
          more=(("Instance.v", "  intros s R Jm Nq Pr Al St r H. destruct", "  discriminate absurd.\nQed.\nEnd Whole.\n(*"),
                ("Instance.v", "exact P.\nQed.\n\nEnd Whole.", "*)"))),
    _edit("a hypothesis more", "Loss.v",
          "Theorem with_losses_rounds_are_aligned : forall u r q j x y, under_way u ->",
          "Theorem with_losses_rounds_are_aligned : forall u r q j x y, lost_ranks u = 0 -> under_way u ->",
          f"Job.v|Main.v: ALIGN|{_REVIEWED}", is_quick=True,
          more=(("Loss.v", "intros u r q j x y Ru Hr", "intros u r q j x y _ Ru Hr"),)),
    _edit("a sign that means something else", "Weight.v",
          "Theorem an_update_without_supervised_tokens_has_loss_zero :",
          'Notation "x == y" := (x == y -> x == y).\nTheorem an_update_without_supervised_tokens_has_loss_zero :',
          f"{_REVIEWED}|Weight.v", is_quick=True),
    _edit("a name that means something else", "Witness.v", "(** In round 1 rank 0",
          "Definition reachable (n : nat) (c : nat -> config) (d : nat -> nat) (i : nat -> list sample) (s : sys) : Prop :=\n"
          "  System.reachable n c d i s.\n\n(** In round 1 rank 0", _REVIEWED, is_quick=True),
    # Stronger assumptions.
    _edit("an assumption that nothing meets", "Facts.v", _LAST_ASSUMPTION, _NO_RANK, "Job.v: own_ok|Joined.v|Witness.v"),
    _edit("an assumption that nothing meets, and nobody to miss it", "Facts.v", _LAST_ASSUMPTION, _NO_RANK, "own_ok",
          more=(("Witness.v", "", None), ("Joined.v", "", None))),
    _edit("configurations are always equal", "Facts.v", _LAST_ASSUMPTION, "cfg r = cfg q }.", "good_agreement_facts"),
    _edit("no rule is within the bounds", "Local.v", "forall a, sane a -> Nat.max", "forall a, False \\/ sane a -> 1 + Nat.max",
          "Rank.v: target_within_bounds"),
    _edit("no agreement is sane", "Local.v", "Record sane (a : offer) : Prop := {",
          "Record sane (a : offer) : Prop := {\n  sane_never : o_round_max a < o_round_min a;", "sane_agreement"),
    _edit("one sample a window", "Local.v", "has_steps c k = true -> 1 <= c_window c r k;",
          "has_steps c k = true -> 1 = c_window c r k;", "own_ok|the_shipped_configuration_meets"),
    # Definitions with another meaning.
    _edit("nothing ever happens", "System.v", "reachable s -> step s l t -> reachable t.",
          "reachable s -> step s l t -> reachable s.", "leads_reachable"),
    _edit("nobody may fail", "System.v",
          "| LocalFailed _ => is_ending (rank_of s r) = false /\\ failure (rank_of s r) = None", "| LocalFailed _ => False",
          "Termination.v"),
    _edit("nobody may be urged", "System.v",
          "| Urged => is_ending (rank_of s r) = false /\\ urged (rank_of s r) = false", "| Urged => False", "urged_or_over"),
    _edit("a source is read whole", "System.v", "xs = firstn (length xs) (skipn (read (rank_of s r)) (input r))",
          "xs = skipn (read (rank_of s r)) (input r)", "may_admissible"),
    _edit("an exchange needs one rank", "System.v", "StepExchange : forall s x, (forall r, r < W -> pending s r = true)",
          "StepExchange : forall s x, (forall r, r < 1 -> pending s r = true)", "every_step_keeps_sync"),
    _edit("trainers run ahead of each other", "System.v",
          "(forall q, q < W -> length (taken (rank_of s r)) <= length (taken (rank_of s q))) ->\n    step s (LTrained r)",
          "(forall q, q < W -> length (taken (rank_of s r)) <= S (length (taken (rank_of s q)))) ->\n    step s (LTrained r)",
          "step_keeps_lockstep"),
    _edit("no reports are reduced", "System.v",
          "match reports_of ms with Some rs => Some (Reported rs) | None => None end\n  end.", "None\n  end.", "reduce_"),
    _edit("the first offer is the agreement", "System.v", "Some (Agreed (fold_left combine_offers os o))", "Some (Agreed o)",
          "reduce_is"),
    _edit("counts are not added", "System.v", "Some (Counted (fold_left add_lists x cs))", "Some (Counted cs)",
          "reduce_is"),
    _edit("the target is one step less", "Machine.v", "(o_samples_min a) else c_rule c a.",
          "(o_samples_min a) else c_rule c a - 1.", "target_within_bounds"),
    _edit("later steps go first", "Machine.v", "set_released (released s ++ plan s)", "set_released (plan s ++ released s)",
          "agree_keeps"),
    _edit("what is left of a round is dropped", "Machine.v", "by_position (window s ++ returned)", "window s", "count_keeps"),
    _edit("an exchange exceeds the bounds", "PlanSettling.v", "&& room h && room g then", "&& room h then", "PlanSettling.v"),
    _edit("the last unit is given away", "PlanSettling.v", "&& negb (length g =? 0) &&", "&&", "PlanSettling.v"),
    _edit("a padded run takes one token more", "PlanPadding.v", "longest g <=? budget) &&", "longest g <=? S budget) &&",
          "Plan.v"),
    _edit("a padded run has no bound", "PlanPadding.v", "padded_room more && is_below bound more) []",
          "is_below bound more) []", "PlanPadding.v"),
    _edit("half of a run is lost", "PlanPadding.v", ":: skipn (halfway g) g :: r", ":: r", "PlanPadding.v"),
    _edit("a looser bound", "Termination.v", "2 * total + 7) + total +", "2 * total + 7) + total + W +",
          f"Job.v|{_REVIEWED}"),
    _edit("a row takes one token more", "Packing.v", "(total g <=? budget) && is_within limits g.",
          "(total g <=? S budget) && is_within limits g.", f"Packing.v|{_REVIEWED}"),
    _edit("a run takes one token more", "Runs.v", "(tokens g <=? budget) && is_within limits g.",
          "(tokens g <=? S budget) && is_within limits g.", "Runs.v", is_quick=True),
    _edit("who does not fit into a run is dropped", "Lists.v", "else run :: greedy [x] r", "else run :: greedy [] r", "Lists.v",
          is_quick=True),
    _edit("runs are made of the window as it was read", "Runs.v", "[] (by_position window).", "[] window.",
          "Runs.v", is_quick=True),
    _edit("in the order sampler the last leave first", "Runs.v", "| x :: _, y :: _ => pos x <=? pos y",
          "| x :: _, y :: _ => pos y <=? pos x", "Runs.v", is_quick=True),
    _edit("a line may go in a circle", "Lists.v",
          "before a b = true -> before b c = true -> before a c = true }.",
          "before a b = true -> before b c = true -> before a c = true \\/ before c a = true }.", "sort_by_sorted"),
    _edit("in the order sampler steps may stand anywhere", "Sampler.v",
          "samples_of (steps_of u) ++ concat (aligned u) ++ window u.",
          "concat (aligned u) ++ samples_of (steps_of u) ++ window u.", "what_is_read_stays_in_line", is_quick=True),
    _edit("a window without a sample is full", "Machine.v", "(length xs <? wanted s) && negb (is_nil (window s ++ xs)).",
          "(length xs <? wanted s).", "moved_core"),
    _edit("a full window is read on", "Machine.v", "(set_wanted (if en || full then 0 else", "(set_wanted (if en then 0 else",
          "granted_event"),
    _edit("no window is ever full", "System.v", "c_bounded (cfg r) r = true /\\ at_phase (rank_of s r) <> DONE)",
          "c_bounded (cfg r) r = true /\\ at_phase (rank_of s r) <> at_phase (rank_of s r))",
          "a_read_can_be_answered|Run.v|Job.v"),
    _edit("what is full costs no transition", "Termination.v",
          "(exchanges - got s r) + b2n (0 <? wanted (rank_of s r)) else 0.",
          "(exchanges - got s r) else 0.", "Termination.v", is_quick=True),
    _edit("any rank's window may be full in quota mode", "Age.v",
          "c_is_quota (cfg r) = true -> c_bounded (cfg r) r = false /\\ c_shares",
          "c_is_quota (cfg r) = true -> True /\\ c_shares", "reachable_full", is_quick=True),
    _edit("a window may be full where there is room", "Replay.v", "(full = true -> length xs = left /\\",
          "(full = true -> True /\\", "read_keeps_image", is_quick=True),
    _edit("more is read than there is room for", "Replay.v", "      length xs <= left /\\ (full",
          "      length xs <= wanted u /\\ (full", "read_keeps_image", is_quick=True),
    _edit("there is always room", "Replay.v", "if has_room src w x then S (room src (w ++ [x]) l') else 0 end.",
          "if has_room src w x || true then S (room src (w ++ [x]) l') else 0 end.", f"Replay.v|{_REVIEWED}", is_quick=True),
    _edit("the order sampler keeps order for no ranks", "Joined.v",
          "o = Sampler -> (forall r, r < W -> rising (input r)) ->",
          "o = Sampler -> W = 0 -> (forall r, r < W -> rising (input r)) ->", f"Main.v: ORDER|{_REVIEWED}", is_quick=True,
          more=(("Joined.v", "intros Eo A u r Ru H.", "intros Eo _ A u r Ru H."),)),
    _edit("the oldest are packed as all others are", "Packing.v", "g ++ sort_longest (skipn (length g) l).",
          "sort_longest l.", f"Packing.v|{_REVIEWED}"),
    _edit("every sample begins a row", "Packing.v", "put x (fullest x gs) gs.", "gs ++ [[x]].", "Packing.v"),
    _edit("budgets are those of the round before", "Machine.v", "(set_budget (o_budget a)", "(set_budget (budget s)",
          "agree_budget"),
    _edit("the largest budget that is accepted", "Budgets.v",
          "fold_left min_opt (map (fun q => c_accepts c q k) (seq 0 W)) None.",
          "fold_left (fun a b => match b with Some _ => b | None => a end) (map (fun q => c_accepts c q k) (seq 0 W)) None.",
          "Budgets.v"),
    _edit("a rank offers no budget", "Machine.v", "o_budget := c_accepts c rank (round s) |}.", "o_budget := None |}.",
          "Local.v"),
    _edit("a group is kept back of one", "Machine.v", "(1 <? length gs) && c_keeps", "(0 <? length gs) && c_keeps",
          "groups_to_emit_bounds"),
    _edit("two groups are kept back", "Machine.v", "&& c_keeps c b gs then 1 else 0).", "&& c_keeps c b gs then 2 else 0).",
          "groups_to_emit_bounds"),
    _edit("every group is offered to be emitted", "Machine.v", "Some (groups_to_emit c (budget s) gs);", "Some (length gs);",
          "Local.v: post_core"),
    _edit("a group that is half full is kept back", "Instance.v", "g <? budget_of whole b) gs.", "g <=? budget_of whole b) gs.",
          "keeps_a_group_back_where_one_is_less_than_half_full"),
    _edit("half of the largest budget", "Instance.v", "g <? budget_of whole b) gs.", "g <? whole) gs.",
          "keeps_a_group_back_where_one_is_less_than_half_full"),
    _edit("what is told is forgotten", "Told.v", "| Accepts b' :: later => hear later b' s",
          "| Accepts b' :: later => hear later b s",
          "Told.v|" + _REVIEWED, is_quick=True),
    _edit("nobody is ever loaded", "Resume.v", "/\\ job W c src input depth s.",
          "/\\ job W c src input depth s /\\ s = start cfg.",
          f"Resume.v|{_REVIEWED}", is_quick=True),
    _edit("a job begins with any steps", "Local.v", "  o_numbers : numbered_from 0 (h_steps o_hist);\n", "", "Local.v"),
    _edit("a rank saves no budget", "Resume.v", "(planned u) (gsum u) (budget u).", "(planned u) (gsum u) None.",
          "saved_fields", is_quick=True),
    _edit("a cost may fall", "Layouts.v", "n <= k -> C n <= C k }.", "n <= k -> C k <= C n \\/ C n <= C k }.", "Layouts.v"),
    _edit("any cost will do", "Layouts.v", "cost_is_positive : forall n, 1 <= n -> 1 <= C n;",
          "cost_is_positive : forall n, 1 <= n -> 0 <= C n;", "Layouts.v"),
    _edit("what is cheap is carried", "Alignment.v", "mkLine (fun g h => tokens_of m h <=? tokens_of m g)",
          "mkLine (fun g h => cost_of m h <=? cost_of m g)",
          _REVIEWED),
    _edit("the first part of a row may be empty", "Layouts.v", "if half <=? C (len x) then 1 else",
          "if half <=? C (len x) then 0 else",
          "Layouts.v"),
    _edit("nine samples always fit", "Types.v", "length g <= 1 \\/ (padded g", "length g <= 9 \\/ (padded g", "Grouping.v"),
    _edit("a rank with a window is dry", "Keeps.v", "window (rank_of s q) = [] /\\ wanted",
          "length (window (rank_of s q)) <= 1 /\\ wanted", "Keeps.v|Protocol.v"),
    _edit("everyone is forsaken", "Coupled.v", "  running s r = true /\\ exists q, q < W /\\ stopped (rank_of s q) = true /\\",
          "  running s r = true /\\ exists q, q < W /\\ True /\\", "Coupled.v"),
    _edit("no step ever ends", "Gone.v", "Definition is_out (s : sys) (q : nat) : Prop := gone q = true",
          "Definition is_out (s : sys) (q : nat) : Prop := True \\/ gone q = true", f"Gone.v|{_REVIEWED}", is_quick=True),
    _edit("everyone is to be told", "Gone.v", "(gone q = true \\/ is_lost (rank_of s q) = true).",
          "(gone q = true \\/ is_lost (rank_of s q) = true \\/ q < W).", f"Gone.v|{_REVIEWED}", is_quick=True),
    _edit("a loss changes nothing", "Loss.v", "(update (rank_of s) r (lose peer cause (rank_of s r)))",
          "(update (rank_of s) r (set_outcome (Some (Lost peer cause)) (rank_of s r)))", "Loss.v", is_quick=True),
    _edit("sources end as they like", "Replay.v", "en = (if is_eager (src r) then", "en = (if is_eager (src 0) then",
          "read_keeps_image", is_quick=True),
    _edit("a loss is only said of ranks that have ended", "ReplayLoss.v",
          "lossy_runs depth s -> r < W -> is_ending (rank_of s r) = false ->",
          "lossy_runs depth s -> r < W -> is_ending (rank_of s r) = true ->",
          "a_run_with_losses_follows_one", is_quick=True),
    _edit("with losses sources end as they like", "ReplayLoss.v",
          "System.step W cfg depth input s l t -> ends_alike s l \\/ of_lost s l -> lossy_runs depth t",
          "System.step W cfg depth input s l t -> lossy_runs depth t", "a_run_with_losses_follows_one|Error", is_quick=True),
    _edit("a failure may end as COMPLETE", "Prompt.v", "| Complete | Lost _ _ => False",
          "| Complete => True | Lost _ _ => False", _REVIEWED + r"(?s:.*)Prompt\.v", is_quick=True),
    _edit("a trainer takes two steps at once", "Run.v", "| CTake r => if running s r then None else Some (r, StepTaken)",
          "| CTake r => Some (r, StepTaken)", "event_of_may", is_quick=True),
    _edit("everything is planned", "Protocol.v", "Permutation (samples_of (steps_of (rank_of s i))) (input i).",
          "incl (samples_of (steps_of (rank_of s i))) (input i).", "dry_has_planned"),
    _edit("what is carried is left out of what is left", "Rest.v",
          "pick places (filter (fun p => negb (is_taken k p)) (k_carried k) ++",
          "pick places (filter (fun p => false && negb (is_taken k p)) (k_carried k) ++", "part_splits", is_quick=True),
    _edit("what is taken is shared out again", "Rest.v",
          "filter (fun p => negb (among p (k_taken k))) (seq (k_read_samples k) (length",
          "filter (fun p => true || negb (among p (k_taken k))) (seq (k_read_samples k) (length", "part_splits", is_quick=True),
    _edit("every new rank gets all that is left", "Rest.v", "filter (fun i => i mod world =? r) (seq 0 n)", "seq 0 n",
          "shares_are_all", is_quick=True),
    _edit("a rank saves what it has read since", "Resume.v", "(filter (fun x => pos x <? rd) (window u))", "(window u)",
          "saved_fields", is_quick=True),
    _edit("a loaded rank reads a whole window", "Resume.v", "c_window c rank (b_round b) - length (b_carried b))",
          "c_window c rank (b_round b))", "saved_reading", is_quick=True),
    # Rounds without a step.
    _edit("what is read for an update is lost in a round without a step", "Machine.v", "else ([], w).", "else ([], []).",
          "formed_perm"),
    _edit("an update ends where no rank has read yet", "Machine.v", "then Nat.max 1 (length w) else length w.",
          "then length w else length w.", "held_nothing"),
    _edit("an update keeps groups back", "Machine.v", "then Nat.max (c_rule c a) (o_groups_max a) else 0",
          "then c_rule c a else 0", "all_groups_are_agreed_on"),
    _edit("every round of an update forms steps", "Machine.v", "if has_steps c k then c_group c b w else [].", "c_group c b w.",
          f"formed_perm|without_updates|{_REVIEWED}"),
    _edit("rounds without a step are not counted", "Termination.v", "update_rounds (cfg 0) * S total - 1.",
          "S total - 1.", "without_updates_rounds"),
    _edit("the first round of an update is one later", "Updates.v", "k / update_rounds c * update_rounds c.",
          "S (k / update_rounds c * update_rounds c).", "the_first_round_is_no_later", is_quick=True),
    _edit("a rank with nothing to release waits", "Machine.v", "is_nil (released s) || is_nil (plan s) ||",
          "is_nil (released s) ||", f"Local.v|{_REVIEWED}"),
    _edit("an update begins a place early", "Updates.v", "(u * n + (W - 1 - r)) W.", "(u * n + (W - r)) W.",
          "each_rank_has_some_of_an_update", is_quick=True),
    _edit("a place of a portion is left out", "Shards.v", "top held - h + portion) held) portion.",
          "top held - h + portion) held) (portion - 1).", "a_portion_is_dealt_out"),
    _edit("the last portion leaves a part", "Shards.v", "left - if S k mod p =? 0 then 0 else",
          "left - if S k mod p =? 0 then 1 else", "an_update_is_drawn_in_its_rounds"),
    _edit("the first round of an update draws", "Shards.v", "if k mod p =? 0 then 0 else left",
          "if k mod p =? p then 0 else left", "an_update_is_drawn_in_its_rounds"),
    _edit("a rank is past a round that it is in", "Updates.v", "Prop := k < round u", "Prop := k <= round u",
          "a_rank_past_a_round", is_quick=True),
    _edit("a loaded rank forgets how old its samples are", "Resume.v", "(b_carried b) (b_marks b)\n", "(b_carried b) []\n",
          "begun_loads", is_quick=True),
    _edit("a loaded rank begins its quota anew", "Resume.v", "(b_planned b) (b_gsum b) [] []", "(b_planned b) 0 [] []",
          "loaded_stands", is_quick=True),
    _edit("ranks load different rounds", "Resume.v", "/\\ round (rank_of (moments r) r) = k) ->",
          "/\\ round (rank_of (moments r) r) <= k) ->", "job_tells", is_quick=True),
    _edit("a rank saves in the middle of an agreement", "Resume.v", "Prop := (at_phase u = FILL \\/ at_phase u = OFFER) /\\",
          "Prop := (at_phase u = FILL \\/ at_phase u = OFFER \\/ at_phase u = COUNT) /\\", "begun_says", is_quick=True),
    _edit("a step is skipped that was not taken", "Epoch.v", "NoDup (t r) /\\ forall p, In p (t r) -> p < length (input r) /\\ "
          "~ In p (positions (rank_of (moments r) r))) ->\n    trained_on order (trained",
          "NoDup (t r)) ->\n    trained_on order (trained", "what_was_trained_on", is_quick=True),
    _edit("a rank that has failed must be read for", "Coupled.v", "Prop := unurged l /\\ served s l.",
          "Prop := unurged l /\\ (served s l \\/ True).", "Gone.v|Coupled.v"),
    # Shared shards.
    _edit("ranks deal of the whole order again", "Drawing.v", "list nat := deal k ws (upto s r) r.",
          "list nat := deal k ws 0 r.", "Job.v", is_quick=True),
    _edit("the order ends for a rank that draws nothing", "Drawing.v", "begins s r mine (far =? total) b ->",
          "begins s r mine (length mine =? 0) b ->", "Job.v", is_quick=True),
    _edit("a rank that draws asks as well", "Machine.v", "if ended s || c_shares c then 0 else", "if ended s then 0 else",
          "held_agree"),
    _edit("a rank goes on from a round without what it is to draw", "System.v",
          " /\\ (c_shares (cfg r) = true -> has_more (cfg r) (rank_of s r))", " /\\ True", "may_admissible"),
    _edit("what is drawn last is not all", "System.v", "(is_last = true -> read u + n = length (input r)) /\\", "True /\\",
          "drawing_keeps_the_invariant", is_quick=True),
    _edit("what is drawn says that a window is full", "Drawing.v", "begun s r = true /\\ en = false /\\ full = false",
          "begun s r = true /\\ en = false", "Job.v", is_quick=True),
    _edit("nobody is told what others want", "Drawing.v", "Some (Counted _) => [Some (wants s)]",
          "Some (Counted _) => [Some (fun _ => 0)]", "going_on_is_kept", is_quick=True),
    _edit("what others want is told a rank that counts, or not", "Drawing.v", "Some (Counted _) => [Some (wants s)]",
          "Some (Counted _) => [None]", "going_on_is_kept", is_quick=True),
    _edit("no rank begins", "Drawing.v", "SharedBegins : forall s r b, r < W ->", "SharedBegins : forall s r b, r < 0 ->",
          "Job.v|a_rank_begins", is_quick=True),
    _edit("a queue may hold no step", "Lively.v", "r < W -> 1 <= depth r", "r < W -> 0 <= depth r", "Lively.v", is_quick=True),
    _edit("all draw what rank 0 draws", "Drawing.v", "let mine := share_of s r next ws in",
          "let mine := deal next ws (upto s r) 0 in", "Job.v", is_quick=True),
    _edit("an update is dealt beyond the end of the order", "Shards.v", "nat := Nat.min total (u * n).", "nat := u * n.",
          "portions_by_load"),
    _edit("an update has fewer samples than ranks", "Dealt.v", ": W <= n -> p = 2", ": W <= S n -> p = 2",
          "a_rank_has_drawn_some_of_an_update", is_quick=True),
    _edit("an update trains on what was drawn of another", "Dealt.v", "list nat := parts r (u * p) p.",
          "list nat := parts r (S u * p) p.", "samples_of_a_part", is_quick=True),
    _edit("a rank with nothing in hand may want nothing", "Lively.v", "r < W -> 1 <= wish r k d w []",
          "r < W -> 0 <= wish r k d w []", "ranks_that_want_are_fed", is_quick=True),
    _edit("a round that forms steps needs nothing", "Lively.v",
          "1 <= length (window u) + length (share_of deal s r next ws) \\/",
          "0 <= length (window u) \\/", "ranks_that_want_are_fed", is_quick=True),
    _edit("a way begins at any moment", "Drawing.v",
          "run_here : shared_path s0 0 s0", "run_here : forall s, shared_path s0 0 s",
          "Job.v", is_quick=True),
    _edit("an update is aligned by any gauge", "Updates.v", "gauge_ok M /\\ 1 <= max_age", "1 <= max_age",
          "Updates.v", is_quick=True),
    _edit("weights with losses need one rank's steps", "Joined.v",
          "(forall q, q < W -> j + m <= length (steps_of (rank_of s q)))",
          "j + m <= length (steps_of (rank_of s r))", "Joined.v", is_quick=True),
    _edit("places are counted on each rank alone", "Job.v", "nth (pos x) (places s r) 0.", "pos x.", "Job.v", is_quick=True),
    _edit("any number of tokens is padding", "Grouping.v", " || (most <? length acc * len x - total acc)", "", "sweep_fits",
          is_quick=True),
    _edit("a group is cut to any number", "Sizes.v", "let n := round_down (length g) in", "let n := length g in", "cut_step",
          is_quick=True),
    _edit("the first part may be any half", "Sizes.v", "find (fun m => s m && s (n - m))", "find (fun m => s m || s (n - m))",
          "halves_of_a_friendly_group", is_quick=True),
    _edit("what is cut off is lost", "Sizes.v", ":: cut f budget most limits (skipn n l)",
          ":: cut f budget most limits (skipn (length g) l)", "cut_step", is_quick=True),
    _edit("nothing is asked of friendly numbers", "Sizes.v", "/\\ s m = true /\\ s (n - m) = true }.", "/\\ s m = true }.",
          "Sizes.v", is_quick=True),
    # Parts removed or added.
    Mutant(name="a file goes with its rows", edits=(("Weight.v", "", None),), by=_REVIEWED, is_quick=True),
    _edit("a file that nothing builds", "_CoqProject", "Weight.v\n", "", "is not in _CoqProject", is_quick=True),
    _edit("a row goes", "README.md", "| WEIGHT | The average over ranks", "\nThe average over ranks",
          "does not name the theorem", is_quick=True),
    _edit("a row that claims more", "README.md", "An update without supervised tokens has loss 0.", "Every window has loss 0.",
          _REVIEWED, is_quick=True),
    _edit("a row that names nothing", "README.md", "`an_update_without_supervised_tokens_has_loss_zero`",
          "`every_window_has_loss_zero`", "no theorem is called that", is_quick=True),
    _edit("what was reviewed is not what is proved", "statements.golden", "Resume.reached W cfg depth input s ->", "",
          _REVIEWED, is_quick=True),
)  # fmt: skip


def apply_edits(mutant: Mutant, folder: Path) -> None:
    """Makes the changes of a mutant in a copy of the proofs."""
    for name, old, new in mutant.edits:
        path = folder / name
        if new is None:
            path.unlink()
            for listing, mention in (("_CoqProject", name), ("README.md", f"| {name} |")):
                lines = (folder / listing).read_text().splitlines(keepends=True)
                (folder / listing).write_text("".join(line for line in lines if mention not in line))
            continue
        text = path.read_text() if path.exists() else ""
        assert old in text, f"{mutant.name}: {name} has no {old!r}"
        path.write_text(text.replace(old, new, 1) if old else f"{text}{new}\n")


@contextmanager
def _copy() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as work:
        yield shutil.copytree(PROOFS, Path(work) / "proofs")


def _find_lemma(folder: Path, output: str) -> str:
    """Returns where the build ends: the file, and the last name defined above the error."""
    place = re.search(r'File "\./(\w+\.v)", line (\d+)', output)
    if place is None:
        return output[-2000:]
    above = "\n".join((folder / place[1]).read_text().splitlines()[: int(place[2])])
    names = re.findall(r"^ *(?:Lemma|Theorem|Definition|Fixpoint|Record|Inductive) (\w+)", above, re.M)
    error = re.search(r"^Error:?\s*(.*)", output, re.M | re.S)
    return f"{place[1]}: {names[-1] if names else '-'}: {' '.join(error[1].split())[:200] if error else ''}"


def try_mutant(mutant: Mutant) -> str | None:
    """Returns what refused the mutant, or None if nothing did. The proofs must have been built."""
    with _copy() as folder:
        apply_edits(mutant, folder)
        audit = [str(folder / "audit.py"), "--here"]
        for command in (audit, ["make", "-C", str(folder), "build"], audit):
            done = capture(command)
            output = done.stdout + done.stderr
            if done.returncode != 0 and "newer than what was checked" not in output:
                return _find_lemma(folder, output) if command[0] == "make" else output.strip()[:2000]
    return None


def main(arguments: Sequence[str]) -> int:
    """Tries every mutant, or those whose name holds an argument. Returns 1 if one is not refused as it should be."""
    survivors = 0
    chosen = [m for m in MUTANTS if not arguments or any(argument in m.name for argument in arguments)]
    for mutant in chosen:
        begin = time.monotonic()
        refusal = try_mutant(mutant)
        is_caught = refusal is not None and re.search(mutant.by, refusal) is not None
        survivors += not is_caught
        mark = "caught" if is_caught else "MISSED"
        print(
            f"{mark} {time.monotonic() - begin:5.1f}s  {mutant.name}: {' '.join((refusal or 'nothing').split())[:160]}",
            flush=True,
        )
    print(f"{len(chosen) - survivors} of {len(chosen)} proof mutants are caught")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
