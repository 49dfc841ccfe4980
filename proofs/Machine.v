(** The machine of odb_ref/core/machine.py for one rank: [transition], field by field. Spec: R3 to R7.

    [None] stands for the Python's UsageError and PeerError. [taken] and [posted] are ghost fields: the steps that the consumer has
    taken (the Python keeps only their number) and the last message that this rank put into the exchange. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment.
Import ListNotations.

(** ** Messages *)

(** [n_costs] lists the use of each further resource. A missing entry is 0; an idle step has none. *)
Record counts := mkCounts { n_samples : nat; n_tokens : nat; n_supervised : nat; n_costs : list nat }.
Definition zero_counts := mkCounts 0 0 0 [].
Fixpoint add_costs (a b : list nat) : list nat :=
  match a, b with [], _ => b | _, [] => a | x :: a', y :: b' => x + y :: add_costs a' b' end.
Definition add_counts (a b : counts) : counts :=
  mkCounts (n_samples a + n_samples b) (n_tokens a + n_tokens b) (n_supervised a + n_supervised b)
    (add_costs (n_costs a) (n_costs b)).
Definition count_group (g : group) : counts :=
  mkCounts (length g) (sum_over len g) (sum_over sup g) (fold_right add_costs [] (map costs g)).

(** In a field that is reduced by MIN, [None] is the neutral element: it stands for no rank. *)
Record offer := mkOffer {
  o_round_min : nat; o_round_max : nat;
  o_print_min : nat; o_print_max : nat;
  o_ready : bool;
  o_failed : option nat;
  o_stop_step : option nat; o_stop_rank : option nat;
  o_samples_min : nat; o_samples_max : nat;
  o_groups_min : option nat; o_groups_max : nat;
  o_due_max : nat;
  o_budget : option nat }.

Definition min_opt (a b : option nat) : option nat :=
  match a, b with
  | Some x, Some y => Some (Nat.min x y)
  | Some x, None => Some x
  | None, y => y
  end.

Definition combine_offers (a b : offer) : offer := {|
  o_round_min := Nat.min (o_round_min a) (o_round_min b); o_round_max := Nat.max (o_round_max a) (o_round_max b);
  o_print_min := Nat.min (o_print_min a) (o_print_min b); o_print_max := Nat.max (o_print_max a) (o_print_max b);
  o_ready := andb (o_ready a) (o_ready b);
  o_failed := min_opt (o_failed a) (o_failed b);
  o_stop_step := min_opt (o_stop_step a) (o_stop_step b); o_stop_rank := min_opt (o_stop_rank a) (o_stop_rank b);
  o_samples_min := Nat.min (o_samples_min a) (o_samples_min b); o_samples_max := Nat.max (o_samples_max a) (o_samples_max b);
  o_groups_min := min_opt (o_groups_min a) (o_groups_min b); o_groups_max := Nat.max (o_groups_max a) (o_groups_max b);
  o_due_max := Nat.max (o_due_max a) (o_due_max b); o_budget := min_opt (o_budget a) (o_budget b) |}.

Record report := mkReport { r_rank : nat; r_cause : option nat; r_round : nat; r_print : nat }.

Inductive msg := MOffer (o : offer) | MCounts (cs : list counts) | MReport (r : report).
Inductive result := Agreed (a : offer) | Counted (cs : list counts) | Reported (rs : list report).

(** ** Configuration: the functions are parameters, so the theorems hold for every choice that meets [config_ok] *)

(** [c_group] forms groups under the budget agreed in the round before; [None] is the largest budget. [c_first] is the budget under
    which a rank begins, and [c_accepts] the budget it accepts when it makes the offer of a round; both are arbitrary (R15).
    [c_in_bytes] is true of ranks whose windows are also bounded in bytes (R2.3), [c_shares] if ranks share one order and draw from it
    (R14). [c_keeps] decides, from the groups of a window and the budget in force, whether a rank that reads on would keep one group
    back (R3.1). [c_updates] is [None] unless ranks form updates (R16); it is then the number of rounds of an update. *)
Record config := mkConfig {
  c_group : option nat -> list sample -> list group;
  c_align : nat -> list group -> nat -> nat -> list group * list sample;
  c_window : nat -> nat -> nat;
  c_is_quota : bool;
  c_quota : option nat;
  c_max_age : nat;
  c_rule : offer -> nat;
  c_print : nat;
  c_first : nat -> option nat;
  c_accepts : nat -> nat -> option nat;
  c_in_bytes : nat -> bool;
  c_shares : bool;
  c_keeps : option nat -> list group -> bool;
  c_updates : option nat }.

Definition is_some {A} (o : option A) : bool := match o with Some _ => true | None => false end.

(** Whether round [k] forms steps: with updates only the last of each (R16.3). What the others read stays in the window. *)
Definition update_rounds (c : config) : nat := match c_updates c with Some p => p | None => 1 end.
Definition has_steps (c : config) (k : nat) : bool := S k mod update_rounds c =? 0.

(** How a rank reads is part of its configuration: its windows, whether it shares an order, and the rounds of its updates. *)
Definition with_reading (shares : bool) (windows : nat -> nat -> nat) (updates : option nat) (c : config) : config :=
  mkConfig (c_group c) (c_align c) windows (c_is_quota c) (c_quota c) (c_max_age c) (c_rule c) (c_print c) (c_first c) (c_accepts c) (c_in_bytes c) shares (c_keeps c) updates.
Definition c_bounded (c : config) (r : nat) : bool := c_in_bytes c r && negb (c_shares c).

(** ** State *)

Inductive phase_name := FILL | OFFER | COUNT | REPORT | DRAIN | DONE.

Inductive outcome_kind :=
| Complete | Stopped (rank step : nat) | Failed (rank cause : nat) | Mismatch (rank : nat) | Lost (peer : option nat) (cause : nat).

Record step := mkStep { s_number : nat; s_round : nat; s_group : group; s_counts : counts }.

Record state := mkState {
  at_phase : phase_name;
  round : nat;
  read : nat;
  ended : bool;
  wanted : nat;
  window : list sample;
  marks : list nat;
  groups : list group;
  budget : option nat;
  aligned : list group;
  plan : list step;
  collated : bool;
  planned : nat;
  gsum : nat;
  released : list step;
  queue : list step;
  taken : list step;
  failure : option nat;
  stopped : bool;
  urged : bool;
  limit : option nat;
  ended_as : option outcome_kind;
  posted : option msg }.

Definition set_phase (v : phase_name) (s : state) : state := mkState v (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_round (v : nat) (s : state) : state := mkState (at_phase s) v (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_read (v : nat) (s : state) : state := mkState (at_phase s) (round s) v (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_ended (v : bool) (s : state) : state := mkState (at_phase s) (round s) (read s) v (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_wanted (v : nat) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) v (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_window (v : list sample) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) v (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_marks (v : list nat) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) v (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_groups (v : list group) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) v (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_budget (v : option nat) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) v (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_aligned (v : list group) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) v (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_plan (v : list step) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) v (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_collated (v : bool) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) v (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_planned (v : nat) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) v (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_gsum (v : nat) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) v (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_released (v : list step) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) v (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_queue (v : list step) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) v (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_taken (v : list step) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) v (failure s) (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_failure (v : option nat) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) v (stopped s) (urged s) (limit s) (ended_as s) (posted s).
Definition set_stopped (v : bool) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) v (urged s) (limit s) (ended_as s) (posted s).
Definition set_urged (v : bool) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) v (limit s) (ended_as s) (posted s).
Definition set_limit (v : option nat) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) v (ended_as s) (posted s).
Definition set_outcome (v : option outcome_kind) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) v (posted s).
Definition set_posted (v : option msg) (s : state) : state := mkState (at_phase s) (round s) (read s) (ended s) (wanted s) (window s) (marks s) (groups s) (budget s) (aligned s) (plan s) (collated s) (planned s) (gsum s) (released s) (queue s) (taken s) (failure s) (stopped s) (urged s) (limit s) (ended_as s) v.

(** ** Offers and targets *)

(** The groups of a window, or none in a round that forms no steps. *)
Definition groups_at (c : config) (k : nat) (b : option nat) (w : list sample) : list group := if has_steps c k then c_group c b w else [].
Notation form_groups c s := (groups_at c (round s) (budget s) (window s)).

Definition due_of (c : config) (marks : list nat) : nat := if negb (is_some (c_updates c)) && (length marks =? c_max_age c) then hd 0 marks else 0.
Definition due_before (c : config) (s : state) : nat := due_of c (marks s).

Definition is_quota_met (c : config) (g : nat) : bool := match c_quota c with Some q => q <=? g | None => false end.

Definition is_ready (s : state) : bool := collated s && (wanted s =? 0).
Definition must_end (s : state) : bool := is_some (failure s) || stopped s.

(** R3.1: all groups, or all but one, but at least one if there are any. *)
Definition groups_to_emit (c : config) (b : option nat) (gs : list group) : nat :=
  length gs - (if (1 <? length gs) && c_keeps c b gs then 1 else 0).

(** R3.1: with updates, a rank that reads on counts as holding a sample, so that the epoch goes on. *)
Definition held_of (c : config) (has_ended : bool) (w : list sample) : nat :=
  if is_some (c_updates c) && negb has_ended then Nat.max 1 (length w) else length w.
Notation held_samples c s := (held_of c (ended s) (window s)).

Definition compute_offer (c : config) (rank : nat) (s : state) (gs : list group) : offer :=
  let held := if is_quota_met c (gsum s) then 0 else held_samples c s in
  {| o_round_min := round s; o_round_max := round s;
     o_print_min := c_print c; o_print_max := c_print c;
     o_ready := is_ready s;
     o_failed := if is_some (failure s) then Some rank else None;
     o_stop_step := if stopped s then Some (length (taken s)) else None;
     o_stop_rank := if stopped s then Some rank else None;
     o_samples_min := held; o_samples_max := held;
     o_groups_min := if ended s || is_some (c_updates c) then None else Some (groups_to_emit c (budget s) gs);
     o_groups_max := length gs;
     o_due_max := count_due (due_before c s) gs;
     o_budget := c_accepts c rank (round s) |}.

(** What an agreement decides: the end of the epoch, or how many steps the round makes. *)
Inductive decision := Closes | Makes (steps : nat).

Definition is_closing (c : config) (a : offer) : bool := (o_samples_max a =? 0) || (c_is_quota c && (o_samples_min a =? 0)).

(** No sample of an update is carried into the next, so each group becomes a step. *)
Definition count_steps (c : config) (a : offer) : nat :=
  if is_some (c_updates c) then if has_steps c (o_round_min a) then Nat.max (c_rule c a) (o_groups_max a) else 0
  else if c_is_quota c then Nat.min (c_rule c a) (o_samples_min a) else c_rule c a.

Definition target (c : config) (a : offer) : decision := if is_closing c a then Closes else Makes (count_steps c a).

(** The steps of a round, of which there are [t], and the samples carried: all of them in a round that forms no steps. *)
Definition align_at (c : config) (k : nat) (w : list sample) (gs : list group) (due t : nat) : list group * list sample :=
  if has_steps c k then c_align c k gs t due else ([], w).
Notation form_steps c s := (align_at c (round s) (window s) (groups s) (due_before c s)).

Definition is_bad (a : offer) : bool :=
  is_some (o_failed a) || negb (o_round_min a =? o_round_max a) || negb (o_print_min a =? o_print_max a).

(** ** Transitions *)

(** What a rank that shares an order learns when it draws: how much it has to read, and whether the order has ended. So it may know of
    the end before it has read everything, and its reads then do not report the end. *)
Definition draws (share : nat) (is_last : bool) (s : state) : state := set_ended is_last (set_wanted share s).

Definition is_nil {A} (l : list A) : bool := match l with [] => true | _ => false end.

(** Each part of a transition is written as a state whose fields contain the case distinctions. A field that the part leaves alone is
    then unchanged by computation, without a proof. *)

(** Whether to post the offer: when it is ready, or at once if the epoch has to end. An urged rank does not wait for its consumer, nor does a
    rank with nothing to release. *)
Definition posts (s : state) : bool :=
  match at_phase s with FILL => must_end s || (is_ready s && (is_nil (released s) || is_nil (plan s) || urged s)) | _ => false end.

Definition post (c : config) (rank : nat) (s : state) : state :=
  let gs := form_groups c s in
  set_phase (if posts s then OFFER else at_phase s) (set_groups (if posts s then gs else groups s)
    (set_posted (if posts s then Some (MOffer (compute_offer c rank s gs)) else posted s) s)).

(** A rank begins by reading its first window; if that is empty, it posts its offer at once. *)
Definition initial (c : config) (rank : nat) : state :=
  post c rank (mkState FILL 0 0 false (c_window c rank 0) [] [] [] (c_first c rank) [] [] true 0 0 [] [] [] None false false None None None).

Definition below (lim : option nat) (n : nat) : bool := match lim with Some l => n <? l | None => true end.

(** The released steps for which the queue has room, and the rest. *)
Fixpoint take_room (room : nat) (lim : option nat) (ob : list step) : list step * list step :=
  match room, ob with
  | S r, x :: ob' => if below lim (s_number x) then let (d, e) := take_room r lim ob' in (x :: d, e) else ([], ob)
  | _, _ => ([], ob)
  end.

Definition deliver (depth : nat) (s : state) : state :=
  let moved := take_room (depth - length (queue s)) (limit s) (released s) in
  set_released (snd moved) (set_queue (queue s ++ fst moved) s).

Definition is_drained (s : state) : bool :=
  match at_phase s with DRAIN => match released s with x :: _ => negb (below (limit s) (s_number x)) | [] => true end | _ => false end.

Definition finish_when_drained (s : state) : state := set_phase (if is_drained s then DONE else at_phase s) s.

Definition drain (depth : nat) (o : outcome_kind) (lim : nat) (s : state) : state :=
  let l := match limit s with Some m => Nat.min lim m | None => lim end in
  finish_when_drained (deliver depth (set_phase DRAIN (set_outcome (Some o) (set_limit (Some l) s)))).

Definition last_n {A} (n : nat) (l : list A) : list A := skipn (length l - n) l.

Definition agree (c : config) (rank depth : nat) (a : offer) (s : state) : option state :=
  if is_bad a then
    Some (set_phase REPORT (set_groups [] (set_posted (Some (MReport (mkReport rank (failure s) (round s) (c_print c)))) s)))
  else if negb (o_round_min a =? round s) then None
  else match o_stop_rank a with
  | Some r => let n := match o_stop_step a with Some n => n | None => 0 end in
              Some (drain depth (Stopped r n) n (set_groups [] s))
  | None =>
      if negb (o_ready a) then None
      else
        let advanced := set_released (released s ++ plan s) (set_plan [] (set_groups [] s)) in
        match target c a with
        | Closes => Some (drain depth Complete (planned s) advanced)
        | Makes t =>
            let (al, carried) := form_steps c s t in
            let want := if ended s || c_shares c then 0 else c_window c rank (S (round s)) - length carried in
            Some (deliver depth
              (set_phase COUNT (set_wanted want (set_window carried (set_marks (last_n (c_max_age c) (marks s ++ [read s]))
              (set_aligned al (set_budget (o_budget a) (set_posted (Some (MCounts (map count_group al))) advanced))))))))
        end
  end.

(** How many steps of a round are made: quota mode stops with the first step that reaches the quota. *)
Fixpoint cut_at (q g : nat) (cs : list counts) : nat :=
  match cs with
  | [] => 0
  | x :: r => if q <=? g + n_samples x then 1 else S (cut_at q (g + n_samples x) r)
  end.

Definition cut (c : config) (g : nat) (cs : list counts) : nat :=
  match c_quota c with Some q => cut_at q g cs | None => length cs end.

Fixpoint make_steps (number rd : nat) (gs : list group) (cs : list counts) : list step :=
  match gs, cs with
  | g :: gs', x :: cs' => mkStep number rd g x :: make_steps (S number) rd gs' cs'
  | _, _ => []
  end.

Definition total_samples (cs : list counts) : nat := sum_over n_samples cs.

Definition count (c : config) (rank : nat) (cs : list counts) (s : state) : option state :=
  if negb (length cs =? length (aligned s)) then None
  else
    let n := cut c (gsum s) cs in
    let returned := concat (skipn n (aligned s)) in
    let win := if is_nil returned then window s else by_position (window s ++ returned) in
    Some (post c rank
      (set_phase FILL (set_round (S (round s)) (set_window win (set_aligned []
      (set_plan (make_steps (planned s) (round s) (firstn n (aligned s)) cs) (set_collated false
      (set_planned (planned s + n) (set_gsum (gsum s + total_samples (firstn n cs)) s))))))))).

(** What went wrong according to the reports of all ranks. [None] if they report nothing, which is a PeerError in Python. *)
Fixpoint first_failed (rs : list report) : option outcome_kind :=
  match rs with
  | [] => None
  | r :: rs' => match r_cause r with Some c => Some (Failed (r_rank r) c) | None => first_failed rs' end
  end.

Fixpoint first_different (ref : report) (rs : list report) : option outcome_kind :=
  match rs with
  | [] => None
  | r :: rs' => if (r_round r =? r_round ref) && (r_print r =? r_print ref) then first_different ref rs'
                else Some (Mismatch (r_rank r))
  end.

Definition failure_of (rs : list report) : option outcome_kind :=
  match first_failed rs with
  | Some o => Some o
  | None => match rs with [] => None | r :: _ => first_different r rs end
  end.

Inductive event :=
| SamplesRead (xs : list sample) (is_ended is_full : bool)
| Collated
| Got (r : result)
| StepTaken
| ConsumerStopped
| LocalFailed (cause : nat)
| Urged.

(** A read may report a full window (R2.3, R5.1) if the window holds a sample, less was read than was wanted, and the source has not
    ended. *)
Definition may_be_full (xs : list sample) (en : bool) (s : state) : bool :=
  negb en && negb (ended s) && (length xs <? wanted s) && negb (is_nil (window s ++ xs)).

Definition is_ending (s : state) : bool := match at_phase s with DRAIN | DONE => true | _ => false end.

Definition transition (c : config) (rank depth : nat) (s : state) (e : event) : option state :=
  match e with
  | SamplesRead xs en full =>
      if (wanted s =? 0) || (wanted s <? length xs) || (is_nil xs && negb en && negb full) || (full && negb (may_be_full xs en s)) then None
      else Some (post c rank (set_read (read s + length xs) (set_ended (ended s || en)
                  (set_wanted (if en || full then 0 else wanted s - length xs) (set_window (window s ++ xs) s)))))
  | Collated => if collated s then None else Some (post c rank (set_collated true s))
  | Got (Agreed a) => match at_phase s with OFFER => agree c rank depth a s | _ => None end
  | Got (Counted cs) => match at_phase s with COUNT => count c rank cs s | _ => None end
  | Got (Reported rs) =>
      match at_phase s with
      | REPORT => match failure_of rs with Some o => Some (drain depth o (planned s - length (plan s)) s) | None => None end
      | _ => None
      end
  | StepTaken =>
      match queue s with
      | [] => None
      | x :: q =>
          if below (limit s) (s_number x) then Some (post c rank (finish_when_drained (deliver depth (set_taken (taken s ++ [x]) (set_queue q s))))) else None
      end
  | ConsumerStopped =>
      match at_phase s with
      | DONE => Some s
      | _ =>
          if stopped s then Some s
          else
            let l := match limit s with Some m => Nat.min m (length (taken s)) | None => length (taken s) end in
            Some (post c rank (finish_when_drained (set_limit (Some l) (set_stopped true s))))
      end
  | LocalFailed cause => if is_ending s || is_some (failure s) then Some s else Some (post c rank (set_failure (Some cause) s))
  | Urged => if is_ending s then Some s else Some (post c rank (set_urged true s))
  end.

(** The exchange broke (R5.10, R7.5): the rank can only end, and hands out no further step. *)
Definition lose (peer : option nat) (cause : nat) (s : state) : state :=
  if is_ending s then s
  else
    let l := match limit s with Some m => Nat.min m (length (taken s)) | None => length (taken s) end in
    let win := if is_nil (aligned s) then window s else by_position (window s ++ concat (aligned s)) in
    set_phase DONE (set_outcome (Some (Lost peer cause)) (set_limit (Some l) (set_aligned [] (set_groups [] (set_window win s))))).

(** Everything that can happen to a rank: an event, or the loss of a peer. *)
Inductive occurrence := Event (e : event) | PeerLost (peer : option nat) (cause : nat).

Definition handle (c : config) (rank depth : nat) (s : state) (x : occurrence) : option state :=
  match x with Event e => transition c rank depth s e | PeerLost peer cause => Some (lose peer cause s) end.

(** True if the transition from [s] to [t] put a message into the exchange. *)
Definition is_waiting (s : state) : bool := match at_phase s with OFFER | COUNT | REPORT => true | _ => false end.

Definition has_posted (s t : state) : bool :=
  is_waiting t && match at_phase s, at_phase t with OFFER, OFFER | COUNT, COUNT | REPORT, REPORT => false | _, _ => true end.
