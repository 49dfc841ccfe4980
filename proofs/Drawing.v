(** Shared shards in the protocol (R14): the system of System.v, with losses, in which ranks read what they draw from one order.

    A rank of shared shards asks for nothing once it has agreed. It posts how many samples it wants with its counts, and with the sums it
    learns what all want, draws its share of the common order and reads it. Compared with System.v, only the books are new: who has drawn
    what. So everything proved of runs of System.v with losses also holds of shared shards ([Job.v]). *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Loss Shards.
Import ListNotations.

(** ** One rank *)

(** The answer to a read reports neither the end nor a full window. [Counted] begins with a draw, so it is left to [shared_step]. *)
Definition handle_shared (c : config) (rank depth : nat) (u : state) (e : event) : option state :=
  match e with
  | SamplesRead xs _ _ => transition (with_reading true (c_window c) (c_updates c) c) rank depth u (SamplesRead xs false false)
  | Got (Counted _) => None
  | _ => transition (with_reading true (c_window c) (c_updates c) c) rank depth u e
  end.

(** Ranks begin by drawing a window: each draws something, or all that there is. With updates they begin by drawing nothing. *)
Definition begins_by_drawing (W total : nat) (cfg : nat -> config) (deal : nat -> (nat -> nat) -> nat -> nat -> list nat) : Prop :=
  (forall r, r < W -> has_steps (cfg r) 0 = true) /\ (forall ws r, r < W -> 1 <= ws r -> 1 <= length (deal 0 ws 0 r) \/ total <= length (dealt_out W deal 0 ws 0)) \/
  (forall r, r < W -> has_steps (cfg r) 0 = false) /\ 1 <= total /\ forall ws d r, deal 0 ws d r = [].

(** ** The system *)

(** [places] are those that a rank has drawn, [upto] is how far it knows the order to be drawn, [wants] is what it wanted last, and [told]
    lists what each exchange of counts has told about the wants of all ranks. *)
Record shared_sys := mkShared {
  base : sys;
  begun : nat -> bool;
  places : nat -> list nat;
  upto : nat -> nat;
  wants : nat -> nat;
  told : list (option (nat -> nat)) }.

Section Shared.
Variables (W total : nat) (cfg : nat -> config) (depth : nat -> nat) (order : nat -> sample).
Variable deal : nat -> (nat -> nat) -> nat -> nat -> list nat.
(** What a rank wants, given its number, the round, the number of places drawn, what its window held and what is carried. *)
Variable wish : nat -> nat -> nat -> list sample -> list sample -> nat.

(** A rank's input is what it has drawn, with positions of its own. *)
Fixpoint content_from (q : nat) (l : list nat) : list sample :=
  match l with
  | [] => []
  | p :: l' => mkSample (sid (order p)) q (len (order p)) (sup (order p)) (costs (order p)) :: content_from (S q) l'
  end.
Definition content (l : list nat) : list sample := content_from 0 l.

Definition first_wants (r : nat) : nat := c_window (cfg 0) 0 0.
(** The places that a rank draws for round [k], given what all want, and how far the order is then drawn. *)
Definition share_of (s : shared_sys) (r k : nat) (ws : nat -> nat) : list nat := deal k ws (upto s r) r.
Definition far_of (s : shared_sys) (r k : nat) (ws : nat -> nat) : nat := upto s r + length (dealt_out W deal k ws (upto s r)).
(** The first window of a rank is its first draw; the first round of an update draws nothing. *)
Definition first_windows (c : config) (q k : nat) : nat := if has_steps c k then Nat.max 1 (length (deal 0 first_wants 0 q)) else 0.
Definition shared_config (r : nat) : config := with_reading true (first_windows (cfg r)) (c_updates (cfg r)) (cfg r).
Notation step places := (System.step W shared_config depth (fun q => content (places q))).

Definition shared_start : shared_sys := mkShared (start shared_config) (fun r => negb (has_steps (cfg r) 0)) (fun _ => []) (fun _ => 0) (fun _ => 0) [].

Definition wish_of (r d : nat) (u t : state) : nat := if ended u then 0 else wish r (S (round u)) d (window u) (window t).

(** What a rank that has begun does apart from drawing: it reads what it has drawn, and no answer reports the end. *)
Definition is_of_its_own (s : shared_sys) (l : label) : Prop :=
  match l with
  | LRank r (SamplesRead _ en full) => begun s r = true /\ en = false /\ full = false
  | LRank _ (Got (Counted _)) => False
  | LRank r _ => begun s r = true
  | LDrawn _ _ _ => False
  | _ => True
  end.

Definition wants_after (s : shared_sys) (l : label) (b : sys) : nat -> nat :=
  match l with LRank r (Got (Agreed _)) => update (wants s) r (wish_of r (upto s r) (rank_of (base s) r) (rank_of b r)) | _ => wants s end.
(** With the sums each rank learns what all want. *)
Definition told_after (s : shared_sys) (b : sys) : list (option (nat -> nat)) :=
  told s ++ match nth_error (results b) (length (log (base s))) with Some (Counted _) => [Some (wants s)] | Some _ => [None] | None => [] end.

(** A rank begins by drawing its first window, and learns whether that is the last. *)
Definition begins (s : shared_sys) (r : nat) (mine : list nat) (is_last : bool) (b : sys) : Prop :=
  if is_last then step (update (places s) r mine) (base s) (match mine with [] => LRank r (SamplesRead [] true false) | _ => LDrawn r (length mine) true end) b
  else b = base s.
(** With the sums a rank draws, if there is anything to draw or to learn. *)
Definition draws_its_share (s : shared_sys) (r : nat) (mine : list nat) (is_last : bool) (b : sys) : Prop :=
  if ended (rank_of (base s) r) || is_nil mine && negb is_last then b = base s
  else step (update (places s) r (places s r ++ mine)) (base s) (LDrawn r (length mine) is_last) b.

(** All transitions without a loss. A rank that has begun goes on from a round only if its window does not stay empty; [Lively.v] shows that
    it never does. *)
Inductive shared_step : shared_sys -> label -> shared_sys -> Prop :=
| SharedBegins : forall s r b, r < W -> begun s r = false ->
    let mine := share_of s r 0 first_wants in
    let far := far_of s r 0 first_wants in
    begins s r mine (far =? total) b ->
    shared_step s (LRank r (SamplesRead [] (far =? total) false))
      (mkShared b (update (begun s) r true) (update (places s) r mine) (update (upto s) r far) (wants s) (told s))
| SharedGoesOn : forall s l b, is_of_its_own s l -> step (places s) (base s) l b ->
    shared_step s l (mkShared b (begun s) (places s) (upto s) (wants_after s l b) (told_after s b))
| SharedCounted : forall s r cs ws b t, r < W -> begun s r = true -> nth_error (told s) (got (base s) r) = Some (Some ws) ->
    let next := S (round (rank_of (base s) r)) in
    let mine := share_of s r next ws in
    let far := far_of s r next ws in
    draws_its_share s r mine (far =? total) b -> step (update (places s) r (places s r ++ mine)) b (LRank r (Got (Counted cs))) t ->
    shared_step s (LRank r (Got (Counted cs)))
      (mkShared t (begun s) (update (places s) r (places s r ++ mine)) (update (upto s) r far) (wants s) (told s)).

(** A run of [n] transitions in which any rank may learn at any moment that a peer is lost. *)
Inductive shared_path (s0 : shared_sys) : nat -> shared_sys -> Prop :=
| run_here : shared_path s0 0 s0
| run_on : forall n s l t, shared_path s0 n s -> shared_step s l t -> shared_path s0 (S n) t
| run_lost : forall n s r peer cause, shared_path s0 n s -> r < W -> is_ending (rank_of (base s) r) = false ->
    shared_path s0 (S n) (mkShared (mkSys (update (rank_of (base s)) r (lose peer cause (rank_of (base s) r))) (got (base s)) (pending (base s)) (log (base s))
      (running (base s))) (begun s) (places s) (upto s) (wants s) (told s)).

Definition shared_run : nat -> shared_sys -> Prop := shared_path shared_start.
Definition shared_reachable (s : shared_sys) : Prop := exists n, shared_run n s.

End Shared.
