(** [perform]: the possible transitions as a program. It is exactly [lossy_step]. It leaves out the draws of ranks that share an order. *)
Require Import List Arith Lia Bool.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol Ending Coupled Termination Loss.
Import ListNotations.

(** What happens next. [CRead r n en full] gives rank [r] its next [n] samples; [CLose] tells it that a peer is lost. *)
Inductive choice :=
| CRead (r n : nat) (en full : bool) | CCollate (r : nat) | CAnswer (r : nat) | CTake (r : nat) | CLeave (r : nat)
| CFail (r cause : nat) | CUrge (r : nat) | CExchange | CTrained (r : nat) | CLose (r : nat) (peer : option nat) (cause : nat).

Definition all_ranks (W : nat) (f : nat -> bool) : bool := forallb f (seq 0 W).

Lemma all_ranks_spec : forall W f, all_ranks W f = true <-> forall r, r < W -> f r = true.
Proof.
  intros W f. unfold all_ranks. rewrite forallb_forall. split; intros H r L; apply H; [apply in_seq; lia|]. apply in_seq in L. lia.
Qed.

(** A rank that shares an order goes on from a round only if its window does not stay empty, or the next round forms no steps. *)
Definition goes_on_with (c : config) (u : state) : bool := negb (c_shares c) || ended u || (1 <=? length (window u) + wanted u) || negb (has_steps c (coming u)).

Lemma goes_on_with_more : forall c u, goes_on_with c u = true <-> (c_shares c = true -> has_more c u).
Proof.
  intros c u. unfold goes_on_with, has_more. rewrite <- (Nat.leb_le 1). destruct (c_shares c), (ended u), (1 <=? length (window u) + wanted u), (has_steps c (coming u)); simpl; intuition congruence.
Qed.

Section Run.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Notation step := (System.step W cfg depth input).
Notation lossy_step := (Loss.lossy_step W cfg depth input).

Definition is_done (u : state) : bool := match at_phase u with DONE => true | _ => false end.

(** The event of rank [r], if it may happen. *)
Definition event_of (s : sys) (c : choice) : option (nat * event) :=
  match c with
  | CRead r n en full =>
      let left := skipn (read (rank_of s r)) (input r) in
      if (n <=? length left) && (negb en || (read (rank_of s r) + n =? length (input r))) &&
         (negb (n =? 0) || en || full) && (negb full || (c_bounded (cfg r) r && negb (is_done (rank_of s r))))
      then Some (r, SamplesRead (firstn n left) en full) else None
  | CCollate r => Some (r, Collated)
  | CAnswer r => if pending s r || negb (goes_on_with (cfg r) (rank_of s r)) then None else match nth_error (results s) (got s r) with Some x => Some (r, Got x) | None => None end
  | CTake r => if running s r then None else Some (r, StepTaken)
  | CLeave r => if stopped (rank_of s r) then None else match at_phase (rank_of s r) with DONE => None | _ => Some (r, ConsumerStopped) end
  | CFail r cause => if is_ending (rank_of s r) || is_some (failure (rank_of s r)) then None else Some (r, LocalFailed cause)
  | CUrge r => if is_ending (rank_of s r) || urged (rank_of s r) then None else Some (r, Urged)
  | _ => None
  end.

Definition rank_moves (s : sys) (r : nat) (e : event) : option sys :=
  if r <? W then
    match transition (cfg r) r (depth r) (rank_of s r) e with
    | Some t => Some (after s r e t)
    | None => None
    end
  else None.

Definition perform (s : sys) (c : choice) : option sys :=
  match c with
  | CExchange =>
      if all_ranks W (pending s) then
        match reduce (messages W s) with
        | Some x => Some (mkSys (rank_of s) (got s) (fun _ => false) (log s ++ [(messages W s, x)]) (running s))
        | None => None
        end
      else None
  | CTrained r =>
      if (r <? W) && running s r && all_ranks W (fun q => length (taken (rank_of s r)) <=? length (taken (rank_of s q)))
      then Some (mkSys (rank_of s) (got s) (pending s) (log s) (update (running s) r false)) else None
  | CLose r peer cause =>
      if (r <? W) && negb (is_ending (rank_of s r))
      then Some (mkSys (update (rank_of s) r (lose peer cause (rank_of s r))) (got s) (pending s) (log s) (running s)) else None
  | _ => match event_of s c with Some (r, e) => rank_moves s r e | None => None end
  end.

Definition is_loss (c : choice) : bool := match c with CLose _ _ _ => true | _ => false end.

Lemma event_of_may : forall s c r e, event_of s c = Some (r, e) -> may cfg input s r e.
Proof.
  intros s c r e E. destruct c as [i n en full|i|i|i|i|i k|i| |i|i p k]; simpl in E; try discriminate.
  - destruct (_ && _) eqn:C; [|discriminate]. injection E as <- <-. apply andb_true_iff in C as [C C4]. apply andb_true_iff in C as [C C3]. apply andb_true_iff in C as [C1 C2].
    apply Nat.leb_le in C1. simpl. rewrite firstn_length, (Nat.min_l _ _ C1). split; [reflexivity|]. split; [|split].
    + intros ->. simpl in C2. apply Nat.eqb_eq, C2.
    + apply orb_true_iff in C3 as [C3|C3]; [|auto]. apply orb_true_iff in C3 as [C3|C3]; [left|auto]. intros X. apply (f_equal (@length _)) in X. rewrite firstn_length, (Nat.min_l _ _ C1) in X. simpl in X. subst n. discriminate.
    + intros ->. simpl in C4. apply andb_true_iff in C4 as [C4 C5]. split; [exact C4|]. apply negb_true_iff in C5. unfold is_done in C5. intros X. rewrite X in C5. discriminate.
  - injection E as <- <-. exact Logic.I.
  - destruct (_ || _) eqn:P; [discriminate|]. apply orb_false_iff in P as [P G]. apply negb_false_iff in G. pose proof (proj1 (goes_on_with_more _ _) G) as Mo.
    destruct (nth_error _ _) eqn:X; [|discriminate]. injection E as <- <-. split; [exact P|]. split; [exact X|exact Mo].
  - destruct (running s i) eqn:P; [discriminate|]. injection E as <- <-. exact P.
  - destruct (stopped (rank_of s i)) eqn:P; [discriminate|]. destruct (at_phase (rank_of s i)) eqn:Ph; try discriminate; injection E as <- <-; simpl; rewrite Ph; split; auto; discriminate.
  - destruct (_ || _) eqn:C; [discriminate|]. injection E as <- <-. apply orb_false_iff in C as [C1 C2]. simpl. split; [exact C1|]. destruct (failure _); [discriminate|reflexivity].
  - destruct (_ || _) eqn:C; [discriminate|]. injection E as <- <-. apply orb_false_iff in C as [C1 C2]. simpl. auto.
Qed.

Lemma may_event_of : forall s r e, may cfg input s r e -> exists c, event_of s c = Some (r, e).
Proof.
  intros s r e M. destruct e as [xs en full| |x| | |cause|]; simpl in M.
  - exists (CRead r (length xs) en full). destruct M as [M1 [M2 [M3 M4]]].
    assert (L : length xs <= length (skipn (read (rank_of s r)) (input r))) by (rewrite M1, firstn_length; lia).
    simpl. replace (length xs <=? _) with true by (symmetry; apply Nat.leb_le, L).
    replace (negb en || _) with true by (symmetry; destruct en; [simpl; apply Nat.eqb_eq; auto|reflexivity]).
    replace (negb _ || en || full) with true by (symmetry; destruct en, full, xs; simpl; try reflexivity; destruct M3 as [M3|[M3|M3]]; congruence).
    replace (negb full || _) with true by (symmetry; destruct full; [destruct (M4 eq_refl) as [-> Nd]; unfold is_done; destruct (at_phase (rank_of s r)); try reflexivity; exfalso; apply Nd; reflexivity|reflexivity]). simpl. rewrite <- M1. reflexivity.
  - exists (CCollate r). reflexivity.
  - exists (CAnswer r). destruct M as [M1 [M2 M3]]. simpl. rewrite M1, M2, (proj2 (goes_on_with_more _ _) M3). reflexivity.
  - exists (CTake r). simpl. rewrite M. reflexivity.
  - exists (CLeave r). destruct M as [M1 M2]. simpl. rewrite M1. destruct (at_phase (rank_of s r)); congruence.
  - exists (CFail r cause). destruct M as [M1 M2]. simpl. rewrite M1, M2. reflexivity.
  - exists (CUrge r). destruct M as [M1 M2]. simpl. rewrite M1, M2. reflexivity.
Qed.

Lemma rank_moves_step : forall s r e t, may cfg input s r e -> rank_moves s r e = Some t -> step s (LRank r e) t.
Proof.
  intros s r e t M E. unfold rank_moves in E. destruct (r <? W) eqn:L; [|discriminate]. apply Nat.ltb_lt in L.
  destruct (transition _ _ _ _ _) as [v|] eqn:T; [|discriminate]. injection E as <-. apply StepRank; assumption.
Qed.

Lemma perform_step : forall s c t, is_loss c = false -> perform s c = Some t ->
  exists l, step s l t /\ is_draw l = false /\ forall r e, l = LRank r e -> event_of s c = Some (r, e).
Proof.
  intros s c t L E.
  assert (G : forall r e, event_of s c = Some (r, e) -> rank_moves s r e = Some t ->
    exists l, step s l t /\ is_draw l = false /\ forall i f, l = LRank i f -> event_of s c = Some (i, f)).
  { intros r e Ev Mv. exists (LRank r e). split; [apply rank_moves_step; [eapply event_of_may; eassumption|exact Mv]|]. split; [reflexivity|congruence]. }
  destruct c; try discriminate; unfold perform in E; try (destruct (event_of s _) as [[i e]|] eqn:Ev; [eauto|discriminate]).
  - destruct (all_ranks W (pending s)) eqn:P; [|discriminate]. destruct (reduce _) eqn:Rd; [|discriminate]. injection E as <-.
    exists LExchange. split; [|split; [reflexivity|discriminate]]. apply StepExchange; [apply all_ranks_spec, P|exact Rd].
  - destruct (_ && _) eqn:C; [|discriminate]. injection E as <-. apply andb_true_iff in C as [C C3]. apply andb_true_iff in C as [C1 C2].
    exists (LTrained r). split; [|split; [reflexivity|discriminate]]. apply StepTrained; [apply Nat.ltb_lt, C1|exact C2|]. intros q Hq. pose proof (proj1 (all_ranks_spec _ _) C3 q Hq) as X. apply Nat.leb_le, X.
Qed.

Theorem the_executable_step_is_the_step_of_the_system : forall s t, lossy_step s t <-> exists c, perform s c = Some t.
Proof.
  intros s t. split.
  - intros X. destruct X as [s l t St Dr|s r peer cause H E].
    + destruct St as [s r e v H M E|s x P Rd|s r H Ru Tk|]; [| | |discriminate].
      * destruct (may_event_of s r e M) as [c Ev]. exists c. apply Nat.ltb_lt in H.
        destruct c; try discriminate Ev; unfold perform, rank_moves; rewrite Ev, H, E; reflexivity.
      * exists CExchange. simpl. rewrite (proj2 (all_ranks_spec _ _) P), Rd. reflexivity.
      * exists (CTrained r). simpl. apply Nat.ltb_lt in H. rewrite H, Ru. simpl.
        replace (all_ranks W _) with true; [reflexivity|]. symmetry. apply all_ranks_spec. intros q Hq. apply Nat.leb_le, Tk, Hq.
    + exists (CLose r peer cause). simpl. apply Nat.ltb_lt in H. rewrite H, E. reflexivity.
  - intros [c E]. destruct (is_loss c) eqn:L.
    + destruct c; try discriminate. simpl in E. destruct (_ && _) eqn:C; [|discriminate]. injection E as <-. apply andb_true_iff in C as [C1 C2].
      apply LossyLoss; [apply Nat.ltb_lt, C1|apply negb_true_iff, C2].
    + destruct (perform_step s c t L E) as [l [St [Dr _]]]. exact (LossyStep W cfg depth input s l t St Dr).
Qed.

Lemma perform_reachable : forall s c t, is_loss c = false -> perform s c = Some t -> reachable W cfg depth input s -> reachable W cfg depth input t.
Proof. intros s c t L E R. destruct (perform_step s c t L E) as [l [St _]]. eapply reach_step; eauto. Qed.

Lemma perform_lossy : forall s c t, perform s c = Some t -> lossy_reachable W cfg depth input s -> lossy_reachable W cfg depth input t.
Proof. intros s c t E [n P]. exists (S n). eapply lossy_on; [exact P|]. apply the_executable_step_is_the_step_of_the_system. eauto. Qed.

End Run.

(** ** Several choices *)

Section Play.
Variable next : sys -> choice -> option sys.

(** Performs the choices in turn, or fails if one cannot be performed. *)
Fixpoint play (cs : list choice) (s : sys) : option sys :=
  match cs with [] => Some s | c :: r => match next s c with Some t => play r t | None => None end end.

(** Performs the first choice that is possible, again and again. *)
Fixpoint go_on (fuel : nat) (cs : list choice) (s : sys) : sys :=
  match fuel with
  | 0 => s
  | S n => match fold_right (fun c found => match next s c with Some t => Some t | None => found end) None cs with
           | Some t => go_on n cs t
           | None => s
           end
  end.

(** What each choice keeps, these keep too. *)
Lemma play_keeps : forall (keeps : sys -> Prop) cs, (forall s c t, In c cs -> next s c = Some t -> keeps s -> keeps t) ->
  forall s t, play cs s = Some t -> keeps s -> keeps t.
Proof.
  intros keeps. induction cs as [|c cs IH]; simpl; intros K s t E R; [injection E as <-; exact R|].
  destruct (next s c) as [u|] eqn:P; [|discriminate]. exact (IH (fun v d w I => K v d w (or_intror I)) u t E (K s c u (or_introl eq_refl) P R)).
Qed.

Lemma go_on_keeps : forall (keeps : sys -> Prop) cs, (forall s c t, In c cs -> next s c = Some t -> keeps s -> keeps t) ->
  forall n s, keeps s -> keeps (go_on n cs s).
Proof.
  intros keeps cs K. induction n as [|n IH]; simpl; intros s R; [exact R|]. destruct (fold_right _ None cs) as [t|] eqn:E; [|exact R]. apply IH.
  assert (I : exists c, In c cs /\ next s c = Some t).
  { clear - E. induction cs as [|c cs IH]; simpl in E; [discriminate|]. destruct (next s c) as [u|] eqn:P; [injection E as <-; exists c; simpl; auto|].
    destruct (IH E) as [d [I X]]. exists d. simpl. auto. }
  destruct I as [c [I P]]. exact (K s c t I P R).
Qed.
End Play.
