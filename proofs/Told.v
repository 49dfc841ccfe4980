(** Budgets that a rank is told between its offers (R5.11): their only effect is a function of the round (R15.2).

    [heard] is what may happen to one rank: an occurrence, or a new budget that it accepts from then on. [hear] keeps the budget beside the
    rank's state and offers it. Every run of [hear] is a run of the machine of Machine.v with some [c_accepts]. So what is proved for any
    [c_accepts] holds whatever ranks are told, and when. *)
Require Import List Arith Lia Bool.
From ODB Require Import Types Machine Local System.
Import ListNotations.

Inductive heard := Accepts (b : option nat) | Happens (x : occurrence).

(** The configuration of a rank that accepts [f k] in round [k]. *)
Definition accepting (c : config) (f : nat -> option nat) : config :=
  mkConfig (c_group c) (c_align c) (c_window c) (c_is_quota c) (c_quota c) (c_max_age c) (c_rule c) (c_print c) (c_first c) (fun _ => f) (c_in_bytes c) (c_shares c) (c_keeps c) (c_updates c).

Section Told.
Variables (c : config) (rank depth : nat).

(** The machine that is told: the budget it accepts now, and its state. *)
Fixpoint hear (hs : list heard) (b : option nat) (s : state) : option state :=
  match hs with
  | [] => Some s
  | Accepts b' :: later => hear later b' s
  | Happens x :: later => match handle (accepting c (fun _ => b)) rank depth s x with Some t => hear later b t | None => None end
  end.

(** The machine that knows what it accepts in each round. *)
Fixpoint follow (hs : list heard) (f : nat -> option nat) (s : state) : option state :=
  match hs with
  | [] => Some s
  | Accepts _ :: later => follow later f s
  | Happens x :: later => match handle (accepting c f) rank depth s x with Some t => follow later f t | None => None end
  end.

(** The next round for which the rank may make an offer. *)
Definition ahead (s : state) : nat := match at_phase s with FILL => round s | _ => S (round s) end.

(** Two functions of the round have the same effect if they agree on the round ahead, or if no offer is made in it. *)
Definition step_with (f g : nat -> option nat) (s : state) (now then_ : option state) : Prop :=
  match now, then_ with
  | Some t, Some u => ahead s <= ahead t /\ ahead s <= ahead u /\ ((f (ahead s) = g (ahead s) \/ ahead t = ahead s) -> t = u)
  | None, None => True
  | _, _ => False
  end.

Lemma post_with : forall f g u s, ahead u = ahead s -> step_with f g s (Some (post (accepting c f) rank u)) (Some (post (accepting c g) rank u)).
Proof.
  intros f g u s A. unfold step_with, post. rewrite <- A. destruct (posts u) eqn:Q; [|auto]. unfold posts in Q. unfold ahead. simpl. destruct (at_phase u); try discriminate.
  repeat split; [lia|lia|]. intros [E|E]; [|lia]. unfold compute_offer. simpl. rewrite E. reflexivity.
Qed.

Lemma same_with : forall f g s t, ahead s <= ahead t -> step_with f g s (Some t) (Some t).
Proof. intros f g s t L. simpl. auto. Qed.

Lemma ahead_of : forall s t, round t = round s -> at_phase t = at_phase s \/ at_phase t <> FILL -> ahead s <= ahead t.
Proof. intros s t R P. unfold ahead. rewrite R. destruct P as [-> |P]; [lia|]. destruct (at_phase t), (at_phase s); try congruence; lia. Qed.

Lemma finish_ahead : forall u, ahead (finish_when_drained u) = ahead u.
Proof.
  intros u. destruct (at_phase u) eqn:P; try (rewrite finish_other by congruence; reflexivity). unfold ahead. destruct (finish_eq u) as [p [-> [-> | ->]]]; simpl; rewrite P; reflexivity.
Qed.

Lemma drain_ahead : forall s u d o l, round u = round s -> ahead s <= ahead (drain d o l u).
Proof. intros s u d o l R. apply ahead_of; [exact R|right]. destruct (drain_phase d o l u) as [-> | ->]; discriminate. Qed.

Lemma handle_with : forall f g s x, step_with f g s (handle (accepting c f) rank depth s x) (handle (accepting c g) rank depth s x).
Proof.
  intros f g s [e|peer cause].
  2:{ apply same_with. unfold lose. destruct (is_ending s) eqn:E; [reflexivity|]. apply ahead_of; [reflexivity|right; discriminate]. }
  destruct e as [xs en full| |[a|cs|rs]| | |cause|]; simpl.
  - destruct (_ || _ || _); [exact I|]. apply post_with. reflexivity.
  - destruct (collated s); [exact I|]. apply post_with. reflexivity.
  - destruct (at_phase s) eqn:P; try exact I. unfold agree. destruct (is_bad a); [apply same_with, ahead_of; [reflexivity|right; discriminate]|].
    destruct (negb _); [exact I|]. destruct (o_stop_rank a); [apply same_with, drain_ahead; reflexivity|]. destruct (negb _); [exact I|].
    change (target (accepting c g) a) with (target (accepting c f) a). destruct (target (accepting c f) a) as [|n]; [apply same_with, drain_ahead; reflexivity|].
    change (align_at (accepting c g)) with (align_at (accepting c f)). change (due_before (accepting c g) s) with (due_before (accepting c f) s). destruct (align_at _ _ _ _ _ _) as [al ca]. apply same_with, ahead_of; [reflexivity|right; discriminate].
  - destruct (at_phase s) eqn:P; try exact I. unfold count. destruct (negb _); [exact I|]. apply post_with. unfold ahead. rewrite P. reflexivity.
  - destruct (at_phase s) eqn:P; try exact I. destruct (failure_of rs); [|exact I]. apply same_with, drain_ahead. reflexivity.
  - destruct (queue s) as [|x q]; [exact I|]. destruct (below _ _); [|exact I]. apply post_with. etransitivity; [apply finish_ahead|reflexivity].
  - destruct (at_phase s); try (apply same_with; reflexivity); (destruct (stopped s); [apply same_with; reflexivity|]); apply post_with; (etransitivity; [apply finish_ahead|reflexivity]).
  - destruct (_ || _); [apply same_with; reflexivity|]. apply post_with. reflexivity.
  - destruct (is_ending s); [apply same_with; reflexivity|]. apply post_with. reflexivity.
Qed.

(** What is accepted in earlier rounds does not matter. *)
Lemma follow_ahead : forall hs f g s, (forall k, ahead s <= k -> f k = g k) -> follow hs f s = follow hs g s.
Proof.
  induction hs as [|[b|x] hs IH]; intros f g s E; simpl; [reflexivity|apply IH, E|].
  pose proof (handle_with f g s x) as X. unfold step_with in X. destruct (handle (accepting c f) rank depth s x) as [t|], (handle (accepting c g) rank depth s x) as [u|]; try contradiction; [|reflexivity].
  destruct X as [X1 [_ X2]]. rewrite <- (X2 (or_introl (E _ (le_n _)))). apply IH. intros k L. apply E. lia.
Qed.

Theorem whatever_a_rank_is_told_it_accepts_by_round : forall hs b s, exists f, hear hs b s = follow hs f s.
Proof.
  induction hs as [|[b'|x] hs IH]; intros b s; simpl; [exists (fun _ => b); reflexivity|apply IH|].
  destruct (handle (accepting c (fun _ => b)) rank depth s x) as [t|] eqn:H.
  - destruct (IH b t) as [f E]. exists (fun k => if (k =? ahead s) && negb (ahead t =? ahead s) then b else f k). set (f' := fun k => _).
    pose proof (handle_with (fun _ => b) f' s x) as X. rewrite H in X. unfold step_with in X.
    destruct (handle (accepting c f') rank depth s x) as [u|] eqn:Hu; [|contradiction]. destruct X as [X1 [_ X2]].
    assert (U : t = u).
    { apply X2. destruct (Nat.eq_dec (ahead t) (ahead s)) as [Z|Z]; [right; exact Z|left]. unfold f'. rewrite Nat.eqb_refl.
      replace (ahead t =? ahead s) with false by (symmetry; apply Nat.eqb_neq, Z). reflexivity. }
    subst u. rewrite E. apply follow_ahead. intros k L. unfold f'. destruct (k =? ahead s) eqn:K; [|reflexivity]. apply Nat.eqb_eq in K. subst k.
    replace (ahead t =? ahead s) with true by (symmetry; apply Nat.eqb_eq; lia). reflexivity.
  - exists (fun _ => b). rewrite H. reflexivity.
Qed.

End Told.
