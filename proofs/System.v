(** W ranks, the exchange between them, their sources and their trainers, under every schedule.

    The exchange is a collective. It completes when every rank has put its next message in, unless the messages differ in kind or
    size. Each rank then receives the result in its own time. A trainer runs a collective of its own in every step: it enters when
    it takes the step, and leaves when every rank has taken that step. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank.
Import ListNotations.

(** ** The reduction *)

(** The contents of messages, if all are of the same kind. *)
Fixpoint all_say {A : Type} (says : msg -> option A) (ms : list msg) : option (list A) :=
  match ms with
  | [] => Some []
  | m :: r => match says m, all_say says r with Some x, Some xs => Some (x :: xs) | _, _ => None end
  end.

Definition offers_of : list msg -> option (list offer) := all_say (fun m => match m with MOffer o => Some o | _ => None end).
Definition counts_of (n : nat) : list msg -> option (list (list counts)) :=
  all_say (fun m => match m with MCounts cs => if length cs =? n then Some cs else None | _ => None end).
Definition reports_of : list msg -> option (list report) := all_say (fun m => match m with MReport x => Some x | _ => None end).

Fixpoint add_lists (a b : list counts) : list counts :=
  match a, b with x :: a', y :: b' => add_counts x y :: add_lists a' b' | _, _ => [] end.

(** [None] if messages of different kinds or sizes met in one collective. *)
Definition reduce (ms : list msg) : option result :=
  match ms with
  | [] => None
  | MOffer o :: r => match offers_of r with Some os => Some (Agreed (fold_left combine_offers os o)) | None => None end
  | MCounts cs :: r => match counts_of (length cs) r with Some x => Some (Counted (fold_left add_lists x cs)) | None => None end
  | MReport _ :: _ => match reports_of ms with Some rs => Some (Reported rs) | None => None end
  end.

(** How an agreement relates to the offers that were reduced to it. *)
Record agreement_of (a : offer) (os : list offer) : Prop := {
  ag_round : forall o, In o os -> o_round_min a <= o_round_min o /\ o_round_max o <= o_round_max a;
  ag_print : forall o, In o os -> o_print_min a <= o_print_min o /\ o_print_max o <= o_print_max a;
  ag_ready : forall o, In o os -> o_ready a = true -> o_ready o = true;
  ag_failed : forall o, In o os -> o_failed o <> None -> o_failed a <> None;
  ag_stop : forall o, In o os -> o_stop_rank o <> None -> o_stop_rank a <> None;
  ag_samples : forall o, In o os -> o_samples_min a <= o_samples_min o /\ o_samples_max o <= o_samples_max a;
  ag_groups : forall o, In o os -> o_groups_max o <= o_groups_max a;
  ag_due : forall o, In o os -> o_due_max o <= o_due_max a;
  at_ready : o_ready a = false -> exists o, In o os /\ o_ready o = false;
  at_failed : forall q, o_failed a = Some q -> exists o, In o os /\ o_failed o = Some q;
  at_stop : forall q, o_stop_rank a = Some q -> exists o, In o os /\ o_stop_rank o = Some q;
  at_samples : exists o, In o os /\ o_samples_max o = o_samples_max a;
  at_samples_min : exists o, In o os /\ o_samples_min o = o_samples_min a;
  at_groups : exists o, In o os /\ o_groups_max o = o_groups_max a;
  at_due : exists o, In o os /\ o_due_max o = o_due_max a;
  at_groups_min : forall g, o_groups_min a = Some g -> exists o, In o os /\ o_groups_min o = Some g;
  at_round_min : exists o, In o os /\ o_round_min o = o_round_min a;
  at_round_max : exists o, In o os /\ o_round_max o = o_round_max a;
  at_print_min : exists o, In o os /\ o_print_min o = o_print_min a;
  at_print_max : exists o, In o os /\ o_print_max o = o_print_max a }.

Lemma min_opt_none : forall a b, a <> None \/ b <> None -> min_opt a b <> None.
Proof. intros [x|] [y|] [H|H]; simpl; congruence. Qed.

Lemma min_opt_some : forall a b x, min_opt a b = Some x -> a = Some x \/ b = Some x.
Proof.
  intros [a|] [b|] x H; simpl in H; auto. injection H as <-. destruct (Nat.min_dec a b) as [-> | ->]; auto.
Qed.

(** A field that is reduced by MIN, and the least of what is reduced. *)
Lemma fold_field : forall f : offer -> option nat, (forall a b, f (combine_offers a b) = min_opt (f a) (f b)) ->
  forall os o, f (fold_left combine_offers os o) = fold_left min_opt (map f os) (f o).
Proof. intros f Hf. induction os as [|p os IH]; intros o; simpl; [reflexivity|]. rewrite IH, Hf. reflexivity. Qed.

Lemma fold_least : forall l m, match fold_left min_opt l m with
  | Some n => In (Some n) (m :: l) /\ forall k, In (Some k) (m :: l) -> n <= k
  | None => forall x, In x (m :: l) -> x = None
  end.
Proof.
  induction l as [|x l IH]; intros m; simpl fold_left.
  - destruct m as [n|]; [split; [left; reflexivity|intros k [E|[]]; injection E as ->; reflexivity]|intros x [<-|[]]; reflexivity].
  - specialize (IH (min_opt m x)). destruct (fold_left min_opt l (min_opt m x)) as [n|].
    + destruct IH as [I M]. split; [destruct I as [I|I]; [apply min_opt_some in I as [-> | ->]|]; simpl; auto|].
      intros k [-> |[-> |J]]; [destruct x|destruct m|apply M; right; exact J]; specialize (M _ (or_introl eq_refl)); lia.
    + intros y [<-|[<-|J]]; [| |apply IH; right; exact J]; specialize (IH _ (or_introl eq_refl)); destruct m, x; simpl in IH; congruence.
Qed.

Lemma fold_offers : forall os o, agreement_of (fold_left combine_offers os o) (o :: os).
Proof.
  induction os as [|p os IH]; intros o; simpl.
  - constructor; simpl; intros; repeat match goal with H : _ \/ False |- _ => destruct H as [<-|[]] end; eauto; try (exists o; auto; fail); split; auto.
  - specialize (IH (combine_offers o p)). set (a := fold_left combine_offers os (combine_offers o p)) in *. clearbody a.
    destruct IH as [H1 H2 H3 H4 H5 H6 H7 H8 T1 T2 T3 T4 T5 T6 T7 T8 T9 T10 T11 T12].
    assert (Z : In (combine_offers o p) (combine_offers o p :: os)) by (left; reflexivity).
    assert (Y : forall x, In x os -> In x (combine_offers o p :: os)) by (intros; right; assumption).
    (* What holds of the two combined holds of each; a field of the two combined is that of one of them. *)
    Ltac of_all H Z Y := intros x [<-|[<-|I]]; [specialize (H _ Z); simpl in H..|exact (H _ (Y _ I))];
      first [lia|intros R; apply H, min_opt_none; auto|intros R; apply H, andb_true_iff in R; apply R].
    Ltac of_one T o p := first [intros q R; specialize (T q R)|intros R; specialize (T R)|idtac];
      destruct T as [x [[<-|X] E]]; [simpl in E|exists x; split; [right; right; exact X|exact E]];
      first [apply andb_false_iff in E as [E|E]|apply min_opt_some in E as [E|E]
            |match type of E with Nat.max ?m ?n = _ => destruct (Nat.max_dec m n) | Nat.min ?m ?n = _ => destruct (Nat.min_dec m n) end];
      [exists o|exists p]; simpl; split; auto; lia.
    constructor; [of_all H1 Z Y|of_all H2 Z Y|of_all H3 Z Y|of_all H4 Z Y|of_all H5 Z Y|of_all H6 Z Y|of_all H7 Z Y|of_all H8 Z Y
      |of_one T1 o p|of_one T2 o p|of_one T3 o p|of_one T4 o p|of_one T5 o p|of_one T6 o p
      |of_one T7 o p|of_one T8 o p|of_one T9 o p|of_one T10 o p|of_one T11 o p|of_one T12 o p].
Qed.

Lemma all_say_is : forall (A : Type) (says : msg -> option A) make (P : A -> Prop), (forall m x, says m = Some x -> m = make x /\ P x) ->
  forall ms xs, all_say says ms = Some xs -> ms = map make xs /\ Forall P xs.
Proof.
  intros A says make P S. induction ms as [|m ms IH]; simpl; intros xs E; [injection E as <-; auto|].
  destruct (says m) as [x|] eqn:Sm; [|discriminate]. destruct (all_say says ms) as [r|]; [|discriminate]. injection E as <-.
  destruct (S m x Sm) as [-> Px]. destruct (IH r eq_refl) as [-> F]. auto.
Qed.

Lemma all_say_total : forall (A : Type) (says : msg -> option A) make (P : A -> Prop), (forall x, P x -> says (make x) = Some x) ->
  forall xs, Forall P xs -> all_say says (map make xs) = Some xs.
Proof. intros A says make P S. induction 1 as [|x xs Px F IH]; simpl; [reflexivity|]. rewrite (S x Px), IH. reflexivity. Qed.

Lemma add_lists_length : forall a b, length a = length b -> length (add_lists a b) = length a.
Proof. induction a as [|x a IH]; intros [|y b] H; simpl in *; try discriminate; [reflexivity|]. rewrite IH; congruence. Qed.

Lemma fold_add_length : forall l a, Forall (fun c => length c = length a) l -> length (fold_left add_lists l a) = length a.
Proof.
  induction l as [|c l IH]; simpl; intros a F; [reflexivity|]. inversion F; subst.
  rewrite IH; rewrite add_lists_length; auto.
Qed.

Lemma reduce_is : forall ms x, reduce ms = Some x -> match x with
  | Agreed a => exists os, ms = map MOffer os /\ agreement_of a os /\ exists o l, os = o :: l /\ a = fold_left combine_offers l o
  | Counted cs => exists l, ms = map MCounts l /\ Forall (fun c => length c = length cs) l /\
    exists c0 l0, l = c0 :: l0 /\ cs = fold_left add_lists l0 c0
  | Reported rs => ms = map MReport rs
  end.
Proof.
  Ltac of_kind := intros [] y X; simpl in X; try discriminate; try (destruct (_ =? _) eqn:L; [apply Nat.eqb_eq in L|discriminate]); injection X as ->; auto.
  intros [|[o|c|r] ms] x H; simpl in H; try discriminate.
  - destruct (offers_of ms) as [os|] eqn:E; [|discriminate]. injection H as <-. apply (all_say_is _ _ MOffer (fun _ => True)) in E as [-> _]; [|of_kind].
    exists (o :: os). split; [reflexivity|]. split; [apply fold_offers|eauto].
  - destruct (counts_of (length c) ms) as [l|] eqn:E; [|discriminate]. injection H as <-. apply (all_say_is _ _ MCounts (fun k => length k = length c)) in E as [-> F]; [|of_kind].
    exists (c :: l). rewrite fold_add_length by assumption. repeat split; eauto.
  - destruct (reports_of _) as [rs|] eqn:E; [|discriminate]. injection H as <-. apply (all_say_is _ _ MReport (fun _ => True)) in E as [E _]; [exact E|of_kind].
Qed.

(** All messages of one exchange are of one kind. *)
Lemma reduce_says : forall ms x m, reduce ms = Some x -> In m ms ->
  match x, m with
  | Agreed a, MOffer o => exists os, ms = map MOffer os /\ agreement_of a os /\ In o os
  | Counted _, MCounts _ | Reported _, MReport _ => True
  | _, _ => False
  end.
Proof.
  intros ms x m R I. apply reduce_is in R. destruct x as [a|cs|rs].
  - destruct R as [os [E [A _]]]. rewrite E in I. apply in_map_iff in I as [o [<- I]]. eauto.
  - destruct R as [l [-> _]]. apply in_map_iff in I as [c [<- _]]. exact Logic.I.
  - rewrite R in I. apply in_map_iff in I as [y [<- _]]. exact Logic.I.
Qed.

(** If an agreement is neither bad nor a stop, every rank was ready when it offered. *)
Lemma not_bad : forall a, is_bad a = false -> o_failed a = None /\ o_round_min a = o_round_max a /\ o_print_min a = o_print_max a.
Proof.
  intros a B. unfold is_bad in B. rewrite !orb_false_iff, !negb_false_iff, !Nat.eqb_eq in B. destruct (o_failed a); [destruct B as [[B _] _]; discriminate|tauto].
Qed.

Lemma all_were_ready : forall a os, agreement_of a os -> is_bad a = false -> o_stop_rank a = None ->
  (forall o, In o os -> o_ready o = false -> o_failed o <> None \/ o_stop_rank o <> None) -> o_ready a = true.
Proof.
  intros a os A B Sr X. destruct (o_ready a) eqn:R; [reflexivity|exfalso]. destruct (at_ready _ _ A R) as [o [Ho Ro]].
  destruct (X o Ho Ro) as [F|F]; [apply (ag_failed _ _ A o Ho) in F|apply (ag_stop _ _ A o Ho) in F; contradiction]. apply F, (not_bad a B).
Qed.

(** ** The system *)

Record sys := mkSys {
  rank_of : nat -> state;
  got : nat -> nat;
  pending : nat -> bool;
  log : list (list msg * result);
  running : nat -> bool }.

Definition update {A} (f : nat -> A) (i : nat) (v : A) : nat -> A := fun j => if j =? i then v else f j.

Lemma update_same : forall A (f : nat -> A) i v, update f i v i = v.
Proof. intros. unfold update. rewrite Nat.eqb_refl. reflexivity. Qed.
Lemma update_other : forall A (f : nat -> A) i j v, j <> i -> update f i v j = f j.
Proof. intros. unfold update. destruct (j =? i) eqn:E; [apply Nat.eqb_eq in E; contradiction|reflexivity]. Qed.

Definition results (s : sys) : list result := map snd (log s).
Definition message (s : state) : msg := match posted s with Some m => m | None => MCounts [] end.

Inductive label := LRank (r : nat) (e : event) | LExchange | LTrained (r : nat) | LDrawn (r n : nat) (is_last : bool).

(** When rank [r] has become [t] by the event [e]. *)
Notation after s r e t := (mkSys (update (rank_of s) r t) (match e with Got _ => update (got s) r (S (got s r)) | _ => got s end)
  (if has_posted (rank_of s r) t then update (pending s) r true else pending s) (log s) (match e with StepTaken => update (running s) r true | _ => running s end)).

Section System.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).

Definition start : sys := mkSys (fun r => initial (cfg r) r) (fun _ => 0) (fun r => is_waiting (initial (cfg r) r)) [] (fun _ => false).

(** When an event may happen to rank [r]. Cases that would change nothing are left out. An urge may come at any time, early or without
    need. A window bounded in bytes may be full whenever it holds a sample, because the model has no sizes in bytes; a rank that is
    done is not told so. A rank that shares an order has drawn before it goes on from a round. *)
Definition may (s : sys) (r : nat) (e : event) : Prop :=
  match e with
  | SamplesRead xs en full =>
      xs = firstn (length xs) (skipn (read (rank_of s r)) (input r)) /\
      (en = true -> read (rank_of s r) + length xs = length (input r)) /\
      (xs <> [] \/ en = true \/ full = true) /\ (full = true -> c_bounded (cfg r) r = true /\ at_phase (rank_of s r) <> DONE)
  | Collated => True
  | Got x => pending s r = false /\ nth_error (results s) (got s r) = Some x /\ (c_shares (cfg r) = true -> has_more (cfg r) (rank_of s r))
  | StepTaken => running s r = false
  | ConsumerStopped => stopped (rank_of s r) = false /\ at_phase (rank_of s r) <> DONE
  | LocalFailed _ => is_ending (rank_of s r) = false /\ failure (rank_of s r) = None
  | Urged => is_ending (rank_of s r) = false /\ urged (rank_of s r) = false
  end.

(** When a rank that shares an order may draw its next [n] samples: with the sums of a round, if it has not drawn in it yet; or, for the
    samples with which it begins, when it learns that they are the last. *)
Definition may_draw (s : sys) (r n : nat) (is_last : bool) : Prop :=
  let u := rank_of s r in
  c_shares (cfg r) = true /\ ended u = false /\ read u + n <= length (input r) /\
  (is_last = true -> read u + n = length (input r)) /\
  (at_phase u = COUNT /\ pending s r = false /\ got s r < length (log s) /\ wanted u = 0 /\ (n <> 0 \/ is_last = true) \/
   at_phase u = FILL /\ n <> 0 /\ wanted u = n /\ is_last = true).

(** Rank [r] draws; no other rank changes. *)
Definition drawn (s : sys) (r n : nat) (is_last : bool) : sys :=
  mkSys (fun q => draws (if q =? r then n else wanted (rank_of s q)) (if q =? r then is_last else ended (rank_of s q)) (rank_of s q))
    (got s) (pending s) (log s) (running s).

Lemma draws_none : forall u, draws (wanted u) (ended u) u = u.
Proof. intros u. destruct u. reflexivity. Qed.
Lemma drawn_other : forall s r n is_last q, q <> r -> rank_of (drawn s r n is_last) q = rank_of s q.
Proof. intros s r n is_last q Ne. simpl. replace (q =? r) with false by (symmetry; apply Nat.eqb_neq, Ne). apply draws_none. Qed.
Lemma drawn_same : forall s r n is_last, rank_of (drawn s r n is_last) r = draws n is_last (rank_of s r).
Proof. intros. simpl. rewrite Nat.eqb_refl. reflexivity. Qed.

Definition messages (s : sys) : list msg := map (fun r => message (rank_of s r)) (seq 0 W).

Inductive step : sys -> label -> sys -> Prop :=
| StepRank : forall s r e t, r < W -> may s r e -> transition (cfg r) r (depth r) (rank_of s r) e = Some t ->
    step s (LRank r e) (after s r e t)
| StepExchange : forall s x, (forall r, r < W -> pending s r = true) -> reduce (messages s) = Some x ->
    step s LExchange (mkSys (rank_of s) (got s) (fun _ => false) (log s ++ [(messages s, x)]) (running s))
| StepTrained : forall s r, r < W -> running s r = true ->
    (forall q, q < W -> length (taken (rank_of s r)) <= length (taken (rank_of s q))) ->
    step s (LTrained r) (mkSys (rank_of s) (got s) (pending s) (log s) (update (running s) r false))
| StepDrawn : forall s r n is_last, r < W -> may_draw s r n is_last -> step s (LDrawn r n is_last) (drawn s r n is_last).

(** A draw belongs to the sums that determine it, and is not counted as a transition of its own. *)
Definition is_draw (l : label) : bool := match l with LDrawn _ _ _ => true | _ => false end.

Inductive reachable : sys -> Prop :=
| reach_start : reachable start
| reach_step : forall s l t, reachable s -> step s l t -> reachable t.

(** A run leads from one state to another. *)
Inductive leads : sys -> sys -> Prop :=
| leads_here : forall s, leads s s
| leads_on : forall s t l u, leads s t -> step t l u -> leads s u.

Lemma leads_reachable : forall s t, leads s t -> reachable s -> reachable t.
Proof. induction 1 as [s|s t l u Ld IH St]; intros R; [exact R|exact (reach_step t l u (IH R) St)]. Qed.

(** ** Assumptions *)

Hypothesis some_rank : 1 <= W.
Hypothesis configs_ok : forall r, r < W -> config_ok (cfg r).
Hypothesis prints_differ : forall r q, r < W -> q < W -> c_print (cfg r) = c_print (cfg q) -> cfg r = cfg q.

(** ** The invariant of the system *)

(** The results that a rank has received, and the history that they give. *)
Definition seen (s : sys) (r : nat) : list result := firstn (got s r) (results s).
Definition hist_from (h0 : origin) (s : sys) (r : nat) : hist := history_from h0 (cfg 0) (seen s r).

Definition sync (s : sys) (r : nat) : Prop :=
  (pending s r = true /\ got s r = length (log s) /\ is_waiting (rank_of s r) = true) \/
  (pending s r = false /\ S (got s r) = length (log s) /\ is_waiting (rank_of s r) = true /\
     exists ms x, nth_error (log s) (got s r) = Some (ms, x) /\ nth_error ms r = Some (message (rank_of s r))) \/
  (pending s r = false /\ got s r = length (log s) /\ is_waiting (rank_of s r) = false).

Definition msg_ok (r : nat) (m : msg) : Prop :=
  match m with
  | MOffer o => o_print_min o = c_print (cfg r) /\ o_print_max o = c_print (cfg r) /\ o_samples_min o = o_samples_max o /\
      (o_ready o = false -> o_failed o <> None \/ o_stop_rank o <> None) /\
      (forall q, o_failed o = Some q -> q = r) /\ (forall q, o_stop_rank o = Some q -> q = r) /\
      (o_stop_rank o <> None -> o_stop_step o <> None)
  | MReport x => r_rank x = r /\ r_print x = c_print (cfg r)
  | MCounts _ => True
  end.

Definition entry_ok (p : list msg * result) : Prop :=
  length (fst p) = W /\ reduce (fst p) = Some (snd p) /\ forall r m, nth_error (fst p) r = Some m -> msg_ok r m.

(** Each rank matches some history. REPLAY needs no more. *)
Record standing (s : sys) : Prop := {
  g_some : forall r, r < W -> exists h, core (cfg r) (cfg 0) r (input r) h (rank_of s r) /\ tight (depth r) (rank_of s r);
  g_sync : forall r, r < W -> sync s r;
  g_log : Forall entry_ok (log s) }.

(** Each rank matches the history that began where the ranks did. *)
Section Origin.
Context {h0 : origin}.
Notation hist_of := (hist_from h0).

Record invariant (s : sys) : Prop := {
  g_standing :> standing s;
  g_core : forall r, r < W -> core (cfg r) (cfg 0) r (input r) (hist_of s r) (rank_of s r) }.

Lemma g_tight : forall s, standing s -> forall r, r < W -> tight (depth r) (rank_of s r).
Proof. intros s I r H. destruct (g_some s I r H) as [h [_ T]]. exact T. Qed.

Lemma post_phase : forall c r s, at_phase (post c r s) = at_phase s \/ (at_phase s = FILL /\ at_phase (post c r s) = OFFER).
Proof. intros c r s. destruct (post_eq c r s) as [[-> _]|[P [_ ->]]]; auto. Qed.

Lemma initial_phase : forall c r, at_phase (initial c r) = FILL \/ at_phase (initial c r) = OFFER.
Proof. intros c r. unfold initial. match goal with |- context[post c r ?u] => destruct (post_phase c r u) as [-> |[_ ->]] end; auto. Qed.

Lemma initial_reads : forall c r, c_window c r 0 <> 0 -> at_phase (initial c r) = FILL.
Proof. intros c r Nz. unfold initial, post, posts, is_ready. simpl. replace (c_window c r 0 =? 0) with false by (symmetry; apply Nat.eqb_neq, Nz). reflexivity. Qed.

Lemma initial_goes_on : forall c r, is_ending (initial c r) = false.
Proof. intros c r. unfold is_ending. destruct (initial_phase c r) as [-> | ->]; reflexivity. Qed.

Lemma initial_in_count : forall c r, in_count (initial c r) = 0.
Proof. intros c r. unfold in_count. destruct (initial_phase c r) as [-> | ->]; reflexivity. Qed.

Lemma deliver_same : forall d s, at_phase (deliver d s) = at_phase s /\ posted (deliver d s) = posted s /\ taken (deliver d s) = taken s.
Proof. intros. destruct (deliver_eq d s) as [a [b [_ [-> _]]]]. auto. Qed.

Definition steady (s t : state) : Prop :=
  (is_waiting s = true -> at_phase t = at_phase s /\ posted t = posted s) /\
  (is_waiting s = false -> has_posted s t = is_waiting t).

Lemma transition_steady : forall c r d s e t, (forall x, e <> Got x) -> transition c r d s e = Some t -> steady s t.
Proof.
  intros c r d s e t NG E. destruct (own_event _ _ _ _ _ _ NG E) as [[_ ->]|[-> _]].
  2:{ split; [auto|]. intros Wa. unfold has_posted, is_waiting in *. destruct (at_phase s); auto; discriminate. }
  assert (Po : posted (moved d s e) = posted s) by (destruct e; reflexivity). set (u := moved d s e) in *. pose proof (moved_phase d s e) as P. fold u in P. split; intros Wa.
  - assert (Pu : at_phase u = at_phase s) by (destruct P as [P|[P _]]; [exact P|unfold is_waiting in Wa; rewrite P in Wa; discriminate]).
    destruct (post_eq c r u) as [[-> _]|[Q _]]; [auto|]. unfold is_waiting in Wa. rewrite <- Pu, Q in Wa. discriminate.
  - unfold has_posted, is_waiting in *. destruct (post_phase c r u) as [X|[X1 X2]]; [rewrite X|rewrite X2; destruct P as [P|[_ P]]; rewrite P in X1; [rewrite X1; reflexivity|discriminate]].
    destruct P as [P|[_ P]]; rewrite P; [destruct (at_phase s); auto; discriminate|reflexivity].
Qed.

Lemma got_posts : forall c r d s x t, transition c r d s (Got x) = Some t -> is_waiting s = true /\ has_posted s t = is_waiting t.
Proof.
  intros c r d s x t E. simpl in E. destruct x as [a|cs|rs]; destruct (at_phase s) eqn:P; try discriminate; (split; [unfold is_waiting; rewrite P; reflexivity|]).
  - assert (Q : at_phase t <> OFFER); [|unfold has_posted, is_waiting; rewrite P; destruct (at_phase t); auto; congruence].
    unfold agree in E. destruct (is_bad a); [injection E as <-; discriminate|]. destruct (negb _); [discriminate|].
    destruct (o_stop_rank a); [injection E as <-; drains|]. destruct (negb _); [discriminate|].
    destruct (target c a) as [|n]; [injection E as <-; drains|].
    destruct (align_at _ _ _ _ _ _). injection E as <-.
    match goal with |- at_phase (deliver ?d ?u) <> _ => destruct (deliver_same d u) as [-> _] end. discriminate.
  - assert (Q : at_phase t <> COUNT); [|unfold has_posted, is_waiting; rewrite P; destruct (at_phase t); auto; congruence].
    unfold count in E. destruct (negb _); [discriminate|]. injection E as <-.
    match goal with |- at_phase (post ?c ?r ?u) <> _ => destruct (post_phase c r u) as [-> |[_ ->]]; discriminate end.
  - assert (Q : at_phase t <> REPORT); [|unfold has_posted, is_waiting; rewrite P; destruct (at_phase t); auto; congruence].
    destruct (failure_of rs); [|discriminate]. injection E as <-. drains.
Qed.

Lemma results_nth : forall s i p, nth_error (log s) i = Some p -> nth_error (results s) i = Some (snd p).
Proof. intros. unfold results. apply map_nth_error. assumption. Qed.

Lemma log_entry : forall s i p, standing s -> nth_error (log s) i = Some p -> entry_ok p.
Proof. intros s i p I H. apply nth_error_In in H. pose proof (g_log s I) as F. rewrite Forall_forall in F. auto. Qed.

(** An agreement that is not bad was made by ranks with one configuration. *)
Lemma good_agreement : forall ms a r, entry_ok (ms, Agreed a) -> is_bad a = false -> r < W -> cfg r = cfg 0.
Proof.
  intros ms a r [L [R M]] B H. simpl in *. destruct (reduce_is _ _ R) as [os [-> [A _]]]. rewrite map_length in L.
  assert (X : forall q, q < W -> c_print (cfg q) = o_print_min a).
  { intros q Hq. destruct (nth_error os q) as [o|] eqn:E; [|apply nth_error_None in E; lia].
    assert (In o os) by (eapply nth_error_In; eauto). destruct (ag_print _ _ A o H0) as [P1 P2].
    specialize (M q (MOffer o)). rewrite (map_nth_error MOffer _ _ E) in M. destruct (M eq_refl) as [M1 [M2 _]].
    destruct (not_bad a B) as [_ [_ Eq]]. lia. }
  apply prints_differ; [assumption|lia|]. rewrite !X; [reflexivity|lia|assumption].
Qed.

Lemma sync_answer : forall s r x, sync s r -> pending s r = false -> nth_error (results s) (got s r) = Some x ->
  is_waiting (rank_of s r) = true /\ S (got s r) = length (log s) /\
  exists ms, nth_error (log s) (got s r) = Some (ms, x) /\ nth_error ms r = Some (message (rank_of s r)).
Proof.
  intros s r x Y P E. destruct Y as [[P' _]|[[_ [G [Wa [ms [y [L M]]]]]]|[_ [G _]]]].
  - congruence.
  - split; [assumption|]. split; [assumption|]. exists ms. rewrite (results_nth _ _ _ L) in E. injection E as <-. auto.
  - exfalso. assert (nth_error (results s) (got s r) <> None) by congruence. apply nth_error_Some in H. unfold results in H. rewrite map_length, G in H. exact (Nat.lt_irrefl _ H).
Qed.

(** If an agreement is ready, each rank's offer in it was ready. *)
Lemma ready_offer : forall ms a r u, entry_ok (ms, Agreed a) -> nth_error ms r = Some (message u) -> o_ready a = true ->
  forall o, posted u = Some (MOffer o) -> o_ready o = true.
Proof.
  intros ms a r u [_ [ER _]] M R o Po. unfold message in M. rewrite Po in M.
  destruct (reduce_says _ _ _ ER (nth_error_In _ _ M)) as [os [_ [A Io]]]. exact (ag_ready _ _ A o Io R).
Qed.

Lemma may_admissible : forall s r e, standing s -> r < W -> may s r e -> admissible (cfg r) (cfg 0) (input r) (rank_of s r) e.
Proof.
  intros s r e I H M. destruct e as [xs en full| |x| | |cause|]; simpl in *; auto; [tauto|]. destruct x as [a| |]; auto; destruct M as [P [E Sh]]; [|exact Sh].
  destruct (sync_answer s r _ (g_sync s I r H) P E) as [Wa [G [ms [L M]]]]. pose proof (log_entry _ _ _ I L) as EO. split.
  - intros B. eapply good_agreement; eauto.
  - eapply ready_offer; eauto.
Qed.

Lemma messages_nth : forall s r, r < W -> nth_error (messages s) r = Some (message (rank_of s r)).
Proof.
  intros s r H. unfold messages. apply (map_nth_error (fun q => message (rank_of s q))).
  apply nth_error_seq, H.
Qed.

Lemma messages_length : forall s, length (messages s) = W.
Proof. intros. unfold messages. rewrite map_length, seq_length. reflexivity. Qed.

(** Each rank has put in one of the messages of an exchange. *)
Lemma each_has_said : forall s (A : Type) (make : A -> msg) l, messages s = map make l ->
  length l = W /\ forall r, r < W -> exists y, nth_error l r = Some y /\ message (rank_of s r) = make y.
Proof.
  intros s A make l E. split; [rewrite <- (map_length make), <- E; apply messages_length|]. intros r H.
  pose proof (messages_nth s r H) as Hm. rewrite E, nth_error_map in Hm. destruct (nth_error l r) as [y|]; [|discriminate]. injection Hm as Hm. eauto.
Qed.

(** The message that a waiting rank has put into the exchange shows what the rank waits for. *)
Lemma waiting_says : forall c c0 r inp h u, core c c0 r inp h u -> is_waiting u = true ->
  match message u with
  | MOffer o => at_phase u = OFFER /\ posted u = Some (MOffer o) /\ offer_ok c r u o
  | MCounts cs => at_phase u = COUNT /\ cs = map count_group (aligned u)
  | MReport x => at_phase u = REPORT /\ posted u = Some (MReport x) /\ r_rank x = r /\ r_print x = c_print c
  end.
Proof.
  intros c c0 r inp h u K Wa. unfold is_waiting in Wa. unfold message. destruct (at_phase u) eqn:P; try discriminate.
  - destruct (k_offer _ _ _ _ _ _ K P) as [o [-> O]]. auto.
  - rewrite (k_count _ _ _ _ _ _ K P). auto.
  - destruct (k_report _ _ _ _ _ _ K P) as [x [-> [R1 R2]]]. auto.
Qed.

Lemma core_message : forall c0 r h u, core (cfg r) c0 r (input r) h u -> is_waiting u = true -> msg_ok r (message u).
Proof.
  intros c0 r h u K Wa. pose proof (waiting_says _ _ _ _ _ _ K Wa) as S. destruct (message u) as [o|cs|x]; [|exact Logic.I|apply S].
  destruct S as [_ [_ O]]. destruct O. simpl. destruct of_print. repeat split; auto; intros q Q; [apply of_failed in Q|apply of_stop in Q]; apply Q.
Qed.

Lemma waiting_message : forall s r, standing s -> r < W -> is_waiting (rank_of s r) = true -> msg_ok r (message (rank_of s r)).
Proof. intros s r I H. destruct (g_some s I r H) as [h [K _]]. eapply core_message, K. Qed.

(** Every step keeps the link between a rank and the exchange. *)
Lemma every_step_keeps_sync : forall s l t, (forall r, r < W -> sync s r) -> step s l t -> forall r, r < W -> sync t r.
Proof.
  intros s l t Y S. destruct S as [s r e t H M E|s x P R|s r H Ru Tk|s r n la H D]; [| |exact Y|exact Y].
  - intros q Hq. unfold sync. simpl. destruct (Nat.eq_dec q r) as [->|NE].
    + rewrite update_same.
      pose proof (answer_or_own e) as Cases.
      destruct Cases as [[y ->]|NG].
      * destruct M as [M1 [M2 _]]. destruct (sync_answer s r _ (Y r H) M1 M2) as [Wa [G _]]. destruct (got_posts _ _ _ _ _ _ E) as [_ HP].
        rewrite HP, update_same. destruct (is_waiting t) eqn:Wt; [left; rewrite update_same|right; right]; repeat split; auto; lia.
      * replace (match e with Got _ => _ | _ => _ end r) with (got s r) by (destruct e; try reflexivity; exfalso; eapply NG; reflexivity).
        destruct (transition_steady _ _ _ _ _ _ NG E) as [S1 S2]. specialize (Y r H). destruct (is_waiting (rank_of s r)) eqn:Wa.
        -- destruct (S1 eq_refl) as [S3 S4]. assert (HP : has_posted (rank_of s r) t = false).
           { unfold has_posted, is_waiting in *. rewrite S3. destruct (at_phase (rank_of s r)); auto; discriminate. }
           assert (Wt : is_waiting t = true) by (unfold is_waiting in *; rewrite S3; exact Wa).
           rewrite HP, Wt. unfold sync, message in *. rewrite S4. rewrite Wa in Y. exact Y.
        -- rewrite (S2 eq_refl). destruct Y as [Y|[Y|Y]]; [destruct Y as [_ [_ Y]]; congruence|destruct Y as [_ [_ [Y _]]]; congruence|].
           destruct Y as [Y1 [Y2 _]]. destruct (is_waiting t) eqn:Wt; [left; rewrite update_same; auto|right; right; auto].
    + rewrite update_other by assumption. replace (match e with Got _ => _ | _ => _ end q) with (got s q) by (destruct e; try reflexivity; rewrite update_other by assumption; reflexivity).
      replace ((if has_posted (rank_of s r) t then update (pending s) r true else pending s) q) with (pending s q); [exact (Y q Hq)|].
      destruct (has_posted _ _); [rewrite update_other by assumption|]; reflexivity.
  - intros r H. right. left. simpl. destruct (Y r H) as [[_ [G1 G2]]|[[Z _]|[Z _]]]; [|rewrite (P r H) in Z; discriminate|rewrite (P r H) in Z; discriminate].
    rewrite app_length. simpl. repeat split; auto; [lia|].
    exists (messages s), x. split; [|apply messages_nth, H]. rewrite nth_error_app2 by lia. rewrite G1, Nat.sub_diag. reflexivity.
Qed.

Lemma seen_current : forall s r, got s r = length (log s) -> seen s r = results s.
Proof. intros s r G. unfold seen, results. rewrite G, <- (map_length snd). apply firstn_all. Qed.

(** A rank that waits for an exchange which has not completed has received all results so far. *)
Lemma pending_sync : forall s r, standing s -> r < W -> pending s r = true -> seen s r = results s /\ got s r = length (log s) /\ is_waiting (rank_of s r) = true.
Proof.
  intros s r I H P. destruct (g_sync s I r H) as [[_ [G Wa]]|[[P' _]|[P' _]]]; try congruence. split; [apply seen_current, G|auto].
Qed.

(** The entry that an exchange adds to the log is correct. *)
Lemma exchange_entry : forall s x, standing s -> (forall r, r < W -> pending s r = true) -> reduce (messages s) = Some x -> entry_ok (messages s, x).
Proof.
  intros s x I P R. repeat split; simpl; [apply messages_length|exact R|].
  intros r m Hm. assert (Hr : r < W) by (rewrite <- (messages_length s); apply nth_error_Some; congruence).
  rewrite messages_nth in Hm by exact Hr. injection Hm as <-. apply (waiting_message s r I Hr), (pending_sync s r I Hr), P, Hr.
Qed.

Lemma exchange_adds_nothing_seen : forall s r x p, got s r = length (log s) -> seen (mkSys (rank_of s) (got s) p (log s ++ [x]) (running s)) r = seen s r.
Proof. intros s r x p G. unfold seen, results. cbn [got log]. rewrite map_app, firstn_app, G, map_length, Nat.sub_diag. simpl. apply app_nil_r. Qed.

(** One step changes one rank and what that rank has received. So if each rank keeps [P], every step keeps [P] of all ranks. *)
Lemma each_rank_keeps : forall (P : nat -> list result -> state -> Prop) s l t, standing s -> step s l t ->
  (forall r e u, l = LRank r e -> r < W -> may s r e -> (forall x, e <> Got x) -> transition (cfg r) r (depth r) (rank_of s r) e = Some u ->
    P r (seen s r) (rank_of s r) -> P r (seen s r) u) ->
  (forall r x u, r < W -> may s r (Got x) -> transition (cfg r) r (depth r) (rank_of s r) (Got x) = Some u ->
    P r (seen s r) (rank_of s r) -> P r (seen s r ++ [x]) u) ->
  (forall r n la, l = LDrawn r n la -> r < W -> may_draw s r n la -> P r (seen s r) (rank_of s r) -> P r (seen s r) (draws n la (rank_of s r))) ->
  (forall r, r < W -> P r (seen s r) (rank_of s r)) -> forall r, r < W -> P r (seen t r) (rank_of t r).
Proof.
  intros P s l t I S Own Answer Draw H r Hr. destruct S as [s i e u Hi M E|s x Pe R|s i Hi Ru Tk|s i n la Hi D].
  - unfold seen. cbn [rank_of got]. change (results (mkSys _ _ _ (log s) _)) with (results s). destruct (Nat.eq_dec r i) as [->|NE].
    + rewrite update_same. destruct (answer_or_own e) as [[x ->]|NG].
      * rewrite update_same, (firstn_snoc _ _ _ _ (proj1 (proj2 M))). exact (Answer i x u Hi M E (H i Hi)).
      * pose proof (Own i e u eq_refl Hi M NG E (H i Hi)) as X. destruct e; try exact X. edestruct NG. reflexivity.
    + rewrite update_other by exact NE. destruct e; try exact (H r Hr). rewrite update_other by exact NE. exact (H r Hr).
  - rewrite (exchange_adds_nothing_seen s r _ _ (proj1 (proj2 (pending_sync s r I Hr (Pe r Hr))))). exact (H r Hr).
  - exact (H r Hr).
  - destruct (Nat.eq_dec r i) as [->|NE]; [rewrite drawn_same; exact (Draw i n la eq_refl Hi D (H i Hi))|rewrite drawn_other by exact NE; exact (H r Hr)].
Qed.

Lemma drawing_keeps_the_invariant_of_a_rank : forall s r n la c0 h, may_draw s r n la -> core (cfg r) c0 r (input r) h (rank_of s r) -> tight (depth r) (rank_of s r) ->
  core (cfg r) c0 r (input r) h (draws n la (rank_of s r)) /\ tight (depth r) (draws n la (rank_of s r)).
Proof.
  intros s r n la c0 h [Sh [En [Le [La Ph]]]] K T. destruct K, T. split; constructor; simpl; auto.
  - intros E. rewrite (La E). split; [reflexivity|congruence].
  - destruct Ph as [[Ph _]|[_ [Nz _]]]; [right; auto|left; right; left; simpl; lia].
  - intros P. destruct Ph as [[Ph _]|[Ph _]]; congruence.
  - intros P. destruct (t_fill P) as [M F]. split; [exact M|]. destruct Ph as [[Ph _]|[_ [_ [Wa _]]]]; [congruence|]. unfold is_ready in *. simpl. rewrite <- Wa. exact F.
Qed.

(** So the log holds only results of correct messages. *)
Lemma every_step_keeps_the_log : forall s l t, standing s -> step s l t -> Forall entry_ok (log t).
Proof.
  intros s l t I S. pose proof (g_log s I) as L. destruct S as [s r e t H M E|s x P R|s r H Ru Tk|s r n la H D]; try exact L.
  apply Forall_app. split; [exact L|]. constructor; [exact (exchange_entry s x I P R)|constructor].
Qed.

Lemma every_step_keeps_the_invariant : forall s l t, invariant s -> step s l t -> invariant t.
Proof.
  intros s l t I S. assert (X : forall r, r < W -> core (cfg r) (cfg 0) r (input r) (hist_of t r) (rank_of t r) /\ tight (depth r) (rank_of t r)).
  { apply (each_rank_keeps (fun r rs u => core (cfg r) (cfg 0) r (input r) (history_from h0 (cfg 0) rs) u /\ tight (depth r) u) s l t I S);
      [intros r e u _ H M NG E [K T]|intros r x u H M E [K T]; rewrite history_snoc|intros r n la _ H D [K T]|split; [apply (g_core s I r H)|apply (g_tight s I r H)]].
    - replace (history_from h0 (cfg 0) (seen s r)) with (next_hist (cfg 0) (history_from h0 (cfg 0) (seen s r)) e) by (destruct e; try reflexivity; edestruct NG; reflexivity).
      exact (every_transition_keeps_the_invariant_of_a_rank _ _ r _ _ _ (configs_ok r H) (history_numbered _ _) _ e u K T (may_admissible s r e I H M) E).
    - exact (every_transition_keeps_the_invariant_of_a_rank _ _ r _ _ _ (configs_ok r H) (history_numbered _ _) _ _ u K T (may_admissible s r _ I H M) E).
    - exact (drawing_keeps_the_invariant_of_a_rank s r n la _ _ D K T). }
  constructor; [constructor; [intros r H; exists (hist_of t r); exact (X r H)|exact (every_step_keeps_sync s l t (g_sync s I) S)|exact (every_step_keeps_the_log s l t I S)]|intros r H; apply (X r H)].
Qed.

End Origin.

Lemma initial_invariant : invariant (h0 := fresh) start.
Proof.
  assert (Core : forall r, r < W -> core (cfg r) (cfg 0) r (input r) h_initial (initial (cfg r) r) /\ tight (depth r) (initial (cfg r) r)).
  { intros r H. split; [apply post_core; constructor; simpl; auto; try discriminate; try lia|apply post_tight; try discriminate; split; simpl; [lia|easy]].
    - unfold kind_ok. reflexivity.
    - left. right. simpl. destruct (has_steps (cfg r) 0) eqn:Hs; [left; pose proof (ok_window _ (configs_ok r H) r 0 Hs); simpl; lia|auto]. }
  constructor; [constructor; [|intros r H; unfold sync; simpl; destruct (is_waiting _); auto|constructor]|intros r H; apply (Core r H)].
  intros r H. eexists. exact (Core r H).
Qed.

Lemma reachable_invariant : forall s, reachable s -> invariant (h0 := fresh) s.
Proof. induction 1; [apply initial_invariant|eapply every_step_keeps_the_invariant; eauto]. Qed.

End System.

Notation hist_of cfg := (hist_from cfg fresh).
