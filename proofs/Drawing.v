(** Shared shards in the protocol (R14): the machine of [Machine.v] with another reading rule, and the system of its ranks.

    A rank of shared shards asks for nothing once it has agreed; with its counts it says how many samples it wants, and with the sums
    it learns what all want, draws its share of the common order and reads it. A run of such ranks is followed by one of ranks
    that have what they drew for their input and may find any window full (R2.3): so what is proved of every run of [System.v] holds
    of shared shards. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Types Alignment Machine Local Rank System Facts Shards.
Import ListNotations.

(** ** One rank *)

(** What a rank knows once it has drawn: how much it is to read, and whether the order has ended. *)
Definition draws (share : nat) (is_last : bool) (u : state) : state := set_ended is_last (set_wanted share u).

(** After the agreement it asks for nothing. *)
Definition asks_nothing (u : state) : state := match at_phase u with COUNT => set_wanted 0 u | _ => u end.

(** An answer says nothing of the end, and leaves nothing out. What follows on [Counted] begins with a draw, and is in [shared_step]. *)
Definition handle_shared (c : config) (rank depth : nat) (u : state) (e : event) : option state :=
  match e with
  | SamplesRead xs _ _ =>
      if (wanted u =? 0) || (wanted u <? length xs) || is_nil xs then None
      else Some (post c rank (set_read (read u + length xs) (set_wanted (wanted u - length xs) (set_window (window u ++ xs) u))))
  | Got (Agreed a) => option_map asks_nothing (transition c rank depth u e)
  | Got (Counted _) => None
  | _ => transition c rank depth u e
  end.

(** ** The system *)

(** [places] are those that a rank has drawn, [upto] how far it knows the order to be drawn, [wants] what it has said last, and
    [told] what each exchange of counts has brought of the wants of all. *)
Record shared_sys := mkShared {
  base : sys;
  begun : nat -> bool;
  places : nat -> list nat;
  upto : nat -> nat;
  wants : nat -> nat;
  told : list (option (nat -> nat)) }.

Section Shared.
Variables (W total : nat).
Variable cfg : nat -> config.
Variable depth : nat -> nat.
Variable order : nat -> sample.
Variable deal : (nat -> nat) -> nat -> nat -> list nat.
(** What a rank wants: of its number, the round, how many places are drawn, what its window held and what is carried. *)
Variable wish : nat -> nat -> nat -> list sample -> list sample -> nat.

(** To the rank what it has drawn is its input, with positions of its own. *)
Fixpoint content_from (q : nat) (l : list nat) : list sample :=
  match l with
  | [] => []
  | p :: l' => mkSample (sid (order p)) q (len (order p)) (sup (order p)) (costs (order p)) :: content_from (S q) l'
  end.
Definition content (l : list nat) : list sample := content_from 0 l.

Definition first_wants (r : nat) : nat := c_window (cfg 0) 0 0.
(** What a rank draws of what all want, and how far the order is then drawn. *)
Definition share_of (s : shared_sys) (r : nat) (ws : nat -> nat) : list nat := deal ws (upto s r) r.
Definition far_of (s : shared_sys) (r : nat) (ws : nat -> nat) : nat := upto s r + length (dealt_out W deal ws (upto s r)).

Definition shared_start : shared_sys := mkShared (start cfg) (fun _ => false) (fun _ => []) (fun _ => 0) (fun _ => 0) [].

(** When an event may happen to a rank that has begun. *)
Definition may_shared (s : shared_sys) (r : nat) (e : event) : Prop :=
  match e with
  | SamplesRead xs _ _ => xs = firstn (length xs) (skipn (read (rank_of (base s) r)) (content (places s r)))
  | _ => may cfg (fun _ => []) (base s) r e
  end.

Definition wish_of (r d : nat) (u t : state) : nat := if ended u then 0 else wish r (S (round u)) d (window u) (window t).

Definition is_counted (x : result) : bool := match x with Counted _ => true | _ => false end.

Definition with_rank (s : sys) (r : nat) (t : state) (e : event) : sys :=
  mkSys (update (rank_of s) r t) (match e with Got _ => update (got s) r (S (got s r)) | _ => got s end)
    (if has_posted (rank_of s r) t then update (pending s) r true else pending s) (log s)
    (match e with StepTaken => update (running s) r true | _ => running s end).

Inductive shared_step : shared_sys -> shared_sys -> Prop :=
| SharedBegins : forall s r t, r < W -> begun s r = false ->
    let mine := share_of s r first_wants in
    let far := far_of s r first_wants in
    t = post (cfg r) r (draws (length mine) (far =? total) (rank_of (base s) r)) ->
    shared_step s (mkShared (with_rank (base s) r t Urged) (update (begun s) r true)
      (update (places s) r (places s r ++ mine)) (update (upto s) r far) (wants s) (told s))
| SharedRank : forall s r e t, r < W -> begun s r = true -> may_shared s r e ->
    handle_shared (cfg r) r (depth r) (rank_of (base s) r) e = Some t ->
    shared_step s (mkShared (with_rank (base s) r t e) (begun s) (places s) (upto s)
      (match e with Got (Agreed _) => update (wants s) r (wish_of r (upto s r) (rank_of (base s) r) t) | _ => wants s end) (told s))
| SharedCounted : forall s r cs ws t, r < W -> begun s r = true -> may_shared s r (Got (Counted cs)) ->
    nth_error (told s) (got (base s) r) = Some (Some ws) ->
    let mine := share_of s r ws in
    let far := far_of s r ws in
    transition (cfg r) r (depth r) (draws (length mine) (far =? total) (rank_of (base s) r)) (Got (Counted cs)) = Some t ->
    shared_step s (mkShared (with_rank (base s) r t (Got (Counted cs))) (begun s)
      (update (places s) r (places s r ++ mine)) (update (upto s) r far) (wants s) (told s))
| SharedExchange : forall s x, (forall r, r < W -> pending (base s) r = true) -> reduce (messages W (base s)) = Some x ->
    shared_step s (mkShared (mkSys (rank_of (base s)) (got (base s)) (fun _ => false) (log (base s) ++ [(messages W (base s), x)])
      (running (base s))) (begun s) (places s) (upto s) (wants s)
      (told s ++ [if is_counted x then Some (wants s) else None]))
| SharedTrained : forall s r, r < W -> running (base s) r = true ->
    (forall q, q < W -> length (taken (rank_of (base s) r)) <= length (taken (rank_of (base s) q))) ->
    shared_step s (mkShared (mkSys (rank_of (base s)) (got (base s)) (pending (base s)) (log (base s)) (update (running (base s)) r false))
      (begun s) (places s) (upto s) (wants s) (told s)).

Inductive shared_reachable : shared_sys -> Prop :=
| shared_here : shared_reachable shared_start
| shared_on : forall s t, shared_reachable s -> shared_step s t -> shared_reachable t.

End Shared.

(** ** Messages that are alike *)

Definition regroup (g : option nat) (o : offer) : offer :=
  mkOffer (o_round_min o) (o_round_max o) (o_print_min o) (o_print_max o) (o_ready o) (o_failed o) (o_stop_step o) (o_stop_rank o)
    (o_samples_min o) (o_samples_max o) g (o_groups_max o) (o_due_max o) (o_budget o).

(** A rank of shared shards knows the end of the order before it has read it. It says so in an offer that ends the epoch, in which
    nobody asks for it. *)
Definition is_last_offer (o : offer) : Prop := o_failed o <> None \/ o_stop_rank o <> None.
Definition alike_offer (o p : offer) : Prop := p = o \/ (is_last_offer o /\ exists g, p = regroup g o).
Definition alike_msg (m n : msg) : Prop := n = m \/ exists o p, m = MOffer o /\ n = MOffer p /\ alike_offer o p.
Definition alike_posts (a b : option msg) : Prop :=
  b = a \/ exists o p, a = Some (MOffer o) /\ b = Some (MOffer p) /\ alike_offer o p.
Definition alike_result (x y : result) : Prop := y = x \/ exists a b, x = Agreed a /\ y = Agreed b /\ alike_offer a b.

Lemma alike_combine : forall o p o' p', alike_offer o p -> alike_offer o' p' -> alike_offer (combine_offers o o') (combine_offers p p').
Proof.
  intros o p o' p' [->|[L [g ->]]] [->|[L' [g' ->]]]; [left; reflexivity|right|right|right]; (split; [|eexists; reflexivity]);
  unfold is_last_offer in *; simpl; [destruct L' as [L|L]|destruct L as [L|L]|destruct L as [L|L]]; [left|right|left|right|left|right]; apply min_opt_none; auto.
Qed.

Lemma alike_fold : forall os ps, Forall2 alike_offer os ps -> forall o p, alike_offer o p ->
  alike_offer (fold_left combine_offers os o) (fold_left combine_offers ps p).
Proof. induction 1 as [|a b os ps H F IH]; simpl; intros o p A; [exact A|]. apply IH, alike_combine; assumption. Qed.

Lemma alike_offers_of : forall ms ns, Forall2 alike_msg ms ns -> forall os, offers_of ms = Some os ->
  exists ps, offers_of ns = Some ps /\ Forall2 alike_offer os ps.
Proof.
  induction 1 as [|m n ms ns H F IH]; intros os E; simpl in E; [injection E as <-; exists []; auto|].
  destruct m as [o| |]; try discriminate. destruct (offers_of ms) as [x|]; [|discriminate]. injection E as <-.
  destruct (IH x eq_refl) as [ps [E P]]. destruct H as [->|[o' [p [E1 [-> A]]]]]; simpl; rewrite E.
  - exists (o :: ps). split; [reflexivity|]. constructor; [left; reflexivity|exact P].
  - injection E1 as <-. exists (p :: ps). split; [reflexivity|]. constructor; assumption.
Qed.

Lemma alike_others : forall ms ns, Forall2 alike_msg ms ns -> (forall o, ~ In (MOffer o) ms) -> ns = ms.
Proof.
  induction 1 as [|m n ms ns H F IH]; intros Hn; [reflexivity|]. rewrite IH by (intros o Ho; apply (Hn o); right; exact Ho).
  destruct H as [->|[o [p [-> _]]]]; [reflexivity|]. exfalso. apply (Hn o). left. reflexivity.
Qed.

Lemma alike_reduce : forall ms ns x, Forall2 alike_msg ms ns -> reduce ms = Some x -> exists y, reduce ns = Some y /\ alike_result x y.
Proof.
  intros ms ns x F R. destruct x as [a|cs|rs].
  - destruct (reduce_agreed _ _ R) as [os [E _]]. destruct ms as [|[o| |] ms]; simpl in R; try discriminate;
      [|destruct (counts_of _ _); discriminate|destruct (reports_of _); discriminate].
    destruct (offers_of ms) as [x|] eqn:O; [|discriminate]. injection R as <-. inversion F as [|? n ? ns' H F']; subst.
    destruct (alike_offers_of _ _ F' _ O) as [ps [E2 P]]. destruct H as [->|[o' [p [E1 [-> A]]]]]; simpl; rewrite E2.
    + eexists. split; [reflexivity|]. right. do 2 eexists. repeat split. apply alike_fold; [exact P|left; reflexivity].
    + injection E1 as <-. eexists. split; [reflexivity|]. right. do 2 eexists. repeat split. apply alike_fold; assumption.
  - destruct (reduce_counted _ _ R) as [l [E _]]. assert (ns = ms) as ->; [|exists (Counted cs); split; [exact R|left; reflexivity]].
    apply alike_others; [exact F|]. intros o I. rewrite E in I. apply in_map_iff in I as [z [Z _]]. discriminate.
  - destruct (reduce_reported _ _ R) as [E _]. assert (ns = ms) as ->; [|exists (Reported rs); split; [exact R|left; reflexivity]].
    apply alike_others; [exact F|]. intros o I. rewrite E in I. apply in_map_iff in I as [z [Z _]]. discriminate.
Qed.

(** ** One rank, followed *)

(** The configuration of one that follows: windows larger than its input, any of which may be full. *)
Definition wide (big : nat) (c : config) : config :=
  mkConfig (c_group c) (c_align c) (fun _ _ => big) (c_is_quota c) (c_quota c) (c_max_age c) (c_rule c) (c_print c) (c_first c) (c_accepts c) (fun _ => true) (c_keeps c).

Lemma wide_ok : forall big c, 1 <= big -> config_ok c -> config_ok (wide big c).
Proof. intros big c B K. destruct K. constructor; simpl; auto. Qed.

Definition dress (w : nat) (e : bool) (m : option msg) (u : state) : state := set_posted m (set_wanted w (set_ended e u)).

(** Reading is under way, of an input of [n] samples. *)
Definition is_open (n : nat) (u : state) (w : nat) (e : bool) : Prop := e = false /\ n < read u + w.

(** How the reads of the two hang together. *)
Definition tied (n : nat) (u : state) (w : nat) (e : bool) : Prop :=
  match at_phase u with
  | COUNT => wanted u = 0 /\ if ended u then w = 0 /\ e = true else is_open n u w e
  | DONE => if wanted u =? 0 then e = true -> ended u = true else is_open n u w e
  | _ => if wanted u =? 0 then w = 0 /\ e = ended u else is_open n u w e
  end.

Definition keeps (u t : state) : Prop :=
  ended t = ended u /\ wanted t = wanted u /\ read t = read u /\ window t = window u /\ round t = round u /\
  (at_phase t = at_phase u \/ (at_phase u <> COUNT /\ at_phase u <> DONE /\ at_phase t <> COUNT)).

Lemma keeps_tied : forall n u t w e, tied n u w e -> keeps u t -> tied n t w e.
Proof.
  intros n u t w e T [E [Wa [R [_ [_ P]]]]]. unfold tied, is_open in *. rewrite E, Wa, R. destruct P as [P|[P1 [P2 P3]]]; [rewrite P; exact T|].
  destruct (at_phase u); try easy; destruct (at_phase t); try easy; destruct (wanted u =? 0); auto; intros ->; destruct T as [_ T]; auto.
Qed.

Lemma post_followed : forall n big c r u w e m, tied n u w e -> read u <= n -> alike_posts (posted u) m ->
  exists m', post (wide big c) r (dress w e m u) = dress w e m' (post c r u) /\ alike_posts (posted (post c r u)) m' /\ keeps u (post c r u).
Proof.
  intros n big c r u w e m T R A.
  assert (Rd : at_phase u = FILL -> is_ready (dress w e m u) = is_ready u /\ (wanted u = 0 -> e = ended u)).
  { intros P. unfold is_ready. change (collated (dress w e m u)) with (collated u). change (wanted (dress w e m u)) with w. unfold tied, is_open in T. rewrite P in T.
    destruct (wanted u =? 0) eqn:Z; [destruct T as [-> ->]; auto|]. apply Nat.eqb_neq in Z. destruct T as [_ T].
    replace (w =? 0) with false by (symmetry; apply Nat.eqb_neq; lia). split; [reflexivity|contradiction]. }
  assert (Po : posts (dress w e m u) = posts u).
  { unfold posts. change (at_phase (dress w e m u)) with (at_phase u). destruct (at_phase u); try reflexivity. destruct (Rd eq_refl) as [-> _]. reflexivity. }
  set (gs := c_group c (budget u) (window u)). unfold post. change (budget (dress w e m u)) with (budget u). change (window (dress w e m u)) with (window u). cbv zeta. rewrite Po.
  change (c_group (wide big c)) with (c_group c). fold gs. eexists. split; [reflexivity|]. destruct (posts u) eqn:G; [|split; [exact A|repeat split; left; reflexivity]].
  assert (P : at_phase u = FILL) by (unfold posts in G; destruct (at_phase u); try discriminate; reflexivity). destruct (Rd P) as [Rw En]. unfold posts in G. rewrite P in G. split.
  - assert (Co : compute_offer (wide big c) r (dress w e m u) gs = regroup (if e then None else Some (groups_to_emit c (budget u) gs)) (compute_offer c r u gs)).
    { unfold compute_offer. rewrite Rw. reflexivity. }
    right. do 2 eexists. split; [reflexivity|]. split; [reflexivity|]. rewrite Co.
    destruct (wanted u =? 0) eqn:Z; [apply Nat.eqb_eq in Z; left; rewrite (En Z); reflexivity|]. right. split; [|eauto].
    assert (F : is_ready u = false) by (unfold is_ready; rewrite Z; apply andb_false_r). rewrite F in G. rewrite orb_false_r in G.
    unfold must_end in G. apply orb_true_iff in G as [G|G]; unfold is_last_offer; simpl; rewrite G; [left|right]; discriminate.
  - unfold keeps. simpl. rewrite P. repeat split. right. repeat split; discriminate.
Qed.

Lemma finish_keeps : forall u, keeps u (finish_when_drained u).
Proof.
  intros u. destruct (at_phase u) eqn:Q; try (rewrite finish_other by congruence; repeat split; left; reflexivity).
  destruct (finish_eq u) as [p [-> [-> | ->]]]; unfold keeps; simpl; rewrite Q; repeat split; [left; reflexivity|right; repeat split; discriminate].
Qed.

Lemma keeps_trans : forall u v t, keeps u v -> keeps v t -> keeps u t.
Proof.
  intros u v t [A1 [A2 [A3 [A4 [A5 A6]]]]] [B1 [B2 [B3 [B4 [B5 B6]]]]]. unfold keeps. rewrite B1, B2, B3, B4, B5, A1, A2, A3, A4, A5. repeat split.
  destruct A6 as [A6|[A6 [A7 A8]]], B6 as [B6|[B6 [B7 B8]]].
  - left. congruence.
  - right. rewrite <- A6. auto.
  - right. rewrite B6. auto.
  - right. auto.
Qed.

Lemma drain_keeps : forall d o l u, at_phase u <> COUNT -> at_phase u <> DONE -> keeps u (drain d o l u).
Proof.
  intros d o l u P1 P2. repeat split. right. split; [exact P1|]. split; [exact P2|]. destruct (drain_phase d o l u) as [-> | ->]; discriminate.
Qed.

(** Events that have nothing to do with reading, agreements or counts. *)
Definition is_plain (e : event) : bool := match e with SamplesRead _ _ _ | Got (Agreed _) | Got (Counted _) => false | _ => true end.

Lemma dress_views : forall w e m u, at_phase (dress w e m u) = at_phase u /\ queue (dress w e m u) = queue u /\ limit (dress w e m u) = limit u /\
  taken (dress w e m u) = taken u /\ stopped (dress w e m u) = stopped u /\ collated (dress w e m u) = collated u /\
  failure (dress w e m u) = failure u /\ is_ending (dress w e m u) = is_ending u /\ planned (dress w e m u) = planned u /\ plan (dress w e m u) = plan u.
Proof. repeat split. Qed.
Lemma plain_followed : forall n big c r d u w e m x t, is_plain x = true -> tied n u w e -> read u <= n -> alike_posts (posted u) m ->
  transition c r d u x = Some t ->
  exists m', transition (wide big c) r d (dress w e m u) x = Some (dress w e m' t) /\ alike_posts (posted t) m' /\ keeps u t.
Proof.
  intros n big c r d u w e m x t Pl T R A E.
  assert (Posts : forall u1, keeps u u1 -> posted u1 = posted u -> exists m', post (wide big c) r (dress w e m u1) = dress w e m' (post c r u1) /\
    alike_posts (posted (post c r u1)) m' /\ keeps u (post c r u1)).
  { intros u1 K Q. destruct (post_followed n big c r u1 w e m) as [m' [E1 [E2 E3]]]; [exact (keeps_tied _ _ _ _ _ T K)| |rewrite Q; exact A|].
    - destruct K as [_ [_ [-> _]]]. exact R.
    - exists m'. split; [exact E1|]. split; [exact E2|]. exact (keeps_trans _ _ _ K E3). }
  assert (NG : (forall y, x <> Got y) \/ exists rs, x = Got (Reported rs)) by (destruct x as [| |[| |rs]| | | |]; try discriminate; eauto; left; discriminate). destruct NG as [NG|[rs ->]].
  - destruct (own_event _ _ _ _ _ _ NG E) as [[G ->]|[-> D]].
    + destruct (Posts (moved d u x)) as [m' [E1 E2]]; [|destruct x; reflexivity|].
      { destruct x; try discriminate; try (repeat split; left; reflexivity); unfold moved; match goal with |- keeps _ (finish_when_drained ?v) => exact (finish_keeps v) end. }
      exists m'. split; [|exact E2]. rewrite <- E1. destruct x; try discriminate; match goal with |- transition ?c ?r ?d ?v ?x = _ => exact (granted_event c r d v x G) end.
    + exists m. split; [exact (deaf_event (wide big c) r d (dress w e m u) x D)|]. split; [exact A|]. repeat split. left. reflexivity.
  - simpl in *. destruct (at_phase u) eqn:P; try discriminate. destruct (failure_of rs) as [o|]; [|discriminate]. injection E as <-.
    exists m. split; [reflexivity|]. split; [exact A|]. apply drain_keeps; congruence.
Qed.

Lemma dress_read : forall w w' e e' m u a b x, set_read a (set_ended e' (set_wanted w' (set_window x (dress w e m u)))) =
  dress w' e' m (set_read a (set_wanted b (set_window x u))).
Proof. reflexivity. Qed.
Lemma dress_more_views : forall w e m u, released (dress w e m u) = released u /\ plan (dress w e m u) = plan u /\ groups (dress w e m u) = groups u /\
  marks (dress w e m u) = marks u /\ read (dress w e m u) = read u /\ ended (dress w e m u) = e /\ round (dress w e m u) = round u /\
  planned (dress w e m u) = planned u /\ failure (dress w e m u) = failure u /\ window (dress w e m u) = window u /\ wanted (dress w e m u) = w.
Proof. repeat split. Qed.
Lemma asks_nothing_unless_counting : forall u, at_phase u <> COUNT -> asks_nothing u = u.
Proof. intros u P. unfold asks_nothing. destruct (at_phase u); congruence. Qed.
Lemma drain_not_counting : forall d o l u, at_phase (drain d o l u) <> COUNT.
Proof. intros d o l u. destruct (drain_phase d o l u) as [-> | ->]; discriminate. Qed.
Lemma read_event : forall c r d s xs en full, transition c r d s (SamplesRead xs en full) =
  if (wanted s =? 0) || (wanted s <? length xs) || (is_nil xs && negb en && negb full) || (full && negb (may_be_full xs en s)) then None
  else Some (post c r (set_read (read s + length xs) (set_ended en (set_wanted (if en || full then 0 else wanted s - length xs) (set_window (window s ++ xs) s))))).
Proof. reflexivity. Qed.

Lemma own_read : forall big c r d u w m xs en full b, xs <> [] -> length xs <= w -> (full = true -> en = false /\ length xs < w) ->
  transition (wide big c) r d (dress w false m u) (SamplesRead xs en full) =
  Some (post (wide big c) r (dress (if en || full then 0 else w - length xs) en m (set_read (read u + length xs) (set_wanted b (set_window (window u ++ xs) u))))).
Proof.
  intros big c r d u w m xs en full b Nx L Fu. rewrite read_event. destruct (dress_more_views w false m u) as [_ [_ [_ [_ [V1 [_ [_ [_ [_ [V2 V3]]]]]]]]]].
  rewrite V1, V2, V3. assert (Lx : 1 <= length xs) by (destruct xs; [easy|simpl; lia]).
  replace (w =? 0) with false by (symmetry; apply Nat.eqb_neq; lia). replace (w <? length xs) with false by (symmetry; apply Nat.ltb_ge; lia).
  replace (is_nil xs) with false by (destruct xs; [easy|reflexivity]).
  assert (Mf : full && negb (may_be_full xs en (dress w false m u)) = false).
  { destruct full; [|reflexivity]. destruct (Fu eq_refl) as [-> F]. unfold may_be_full. rewrite V2, V3.
    replace (length xs <? w) with true by (symmetry; apply Nat.ltb_lt; lia). destruct (window u); [destruct xs; [easy|reflexivity]|reflexivity]. }
  rewrite Mf, (dress_read w _ false en m u _ b). reflexivity.
Qed.

Lemma own_tied : forall n u w k b x, n < read u + w -> k <= wanted u -> 0 < wanted u -> wanted u <= w -> at_phase u <> COUNT ->
  exists en full, (full = true -> en = false /\ at_phase u <> DONE /\ k = wanted u) /\ (en = true -> k = wanted u /\ ended u = true) /\
    tied n (set_read (read u + k) (set_wanted (wanted u - k) (set_window x (set_ended b u)))) (if en || full then 0 else w - k) en \/ b <> ended u.
Proof.
  intros n u w k b x Op L Z Lw NC. destruct (bool_dec b (ended u)) as [->|Nb]; [|exists false, false; right; exact Nb].
  destruct (Nat.eq_dec k (wanted u)) as [->|Nk].
  - destruct (at_phase u) eqn:P; try congruence;
    try (exists (ended u), (negb (ended u)); left; unfold tied, is_open; simpl; rewrite P, Nat.sub_diag; simpl; destruct (ended u); simpl; repeat split; auto; discriminate).
    exists false, false. left. unfold tied. simpl. rewrite P, Nat.sub_diag. repeat split; auto; discriminate.
  - exists false, false. left. split; [discriminate|]. split; [discriminate|]. unfold tied, is_open. simpl.
    replace (wanted u - k =? 0) with false by (symmetry; apply Nat.eqb_neq; lia). destruct (at_phase u); try congruence; split; auto; lia.
Qed.

Lemma read_followed : forall n big c r d u w e m xs en0 full0 t more, tied n u w e -> alike_posts (posted u) m ->
  read u + wanted u + more = n -> (ended u = true -> more = 0) ->
  handle_shared c r d u (SamplesRead xs en0 full0) = Some t ->
  exists en full w' e' m', transition (wide big c) r d (dress w e m u) (SamplesRead xs en full) = Some (dress w' e' m' t) /\
    alike_posts (posted t) m' /\ tied n t w' e' /\ (en = true -> read u + length xs = n) /\ (full = true -> at_phase u <> DONE) /\ xs <> [] /\
    ended t = ended u /\ read t + wanted t = read u + wanted u /\ round t = round u /\ at_phase u <> COUNT /\ at_phase t <> COUNT.
Proof.
  intros n big c r d u w e m xs en0 full0 t more T A Sp Mo E. unfold handle_shared in E.
  destruct (wanted u =? 0) eqn:Z; [discriminate|]. destruct (wanted u <? length xs) eqn:L; [discriminate|]. cbn [orb] in E.
  assert (Nx : xs <> []) by (intros ->; discriminate). assert (Ni : is_nil xs = false) by (destruct xs; [easy|reflexivity]). rewrite Ni in E. injection E as E.
  apply Nat.ltb_ge in L. assert (Op : is_open n u w e /\ at_phase u <> COUNT).
  { unfold tied in T. rewrite Z in T. apply Nat.eqb_neq in Z. destruct (at_phase u); try (split; [exact T|discriminate]). destruct T as [T _]. contradiction. }
  destruct Op as [[-> Op] NC]. apply Nat.eqb_neq in Z.
  destruct (own_tied n u w (length xs) (ended u) (window u ++ xs)) as [en [full [[F1 [F2 F3]]|F]]]; [exact Op|exact L|lia|pose proof (Nat.le_refl 0); lia|exact NC| |congruence].
  assert (F4 : full = true -> en = false /\ length xs < w) by (intros F; destruct (F1 F) as [G1 [_ G2]]; split; [exact G1|lia]).
  pose proof (own_read big c r d u w m xs en full (wanted u - length xs) Nx ltac:(lia) F4) as Tr.
  set (u1 := set_read (read u + length xs) (set_wanted (wanted u - length xs) (set_window (window u ++ xs) u))) in *.
  assert (Eu : set_read (read u + length xs) (set_wanted (wanted u - length xs) (set_window (window u ++ xs) (set_ended (ended u) u))) = u1) by (unfold u1; destruct u; reflexivity).
  rewrite Eu in F3. assert (Fr : ended u1 = ended u /\ wanted u1 = wanted u - length xs /\ read u1 = read u + length xs /\ round u1 = round u /\ at_phase u1 = at_phase u /\ posted u1 = posted u)
    by (repeat split).
  clearbody u1. clear Eu. destruct Fr as [R1 [R2 [R3 [R4 [R5 R6]]]]].
  destruct (post_followed n big c r u1 _ en m F3) as [m' [P1 [P2 P3]]]; [rewrite R3; lia|rewrite R6; exact A|].
  rewrite P1, E in Tr. rewrite E in P2, P3. pose proof (keeps_tied _ _ _ _ _ F3 P3) as T1. destruct P3 as [K1 [K2 [K3 [K4 [K5 K6]]]]].
  eexists en, full, _, en, m'. split; [exact Tr|]. split; [exact P2|]. split; [exact T1|].
  split; [intros H; destruct (F2 H) as [G1 G2]; specialize (Mo G2); lia|]. split; [intros H; apply (F1 H)|]. split; [exact Nx|].
  rewrite K1, K2, K3, K5, R1, R2, R3, R4. repeat split; auto; [lia|]. destruct K6 as [->|[_ [_ K6]]]; [rewrite R5; exact NC|exact K6].
Qed.

(** In COUNT a rank that follows says that its window is full, or its source at its end, where nothing is drawn. *)
Lemma nothing_read : forall big c r d u w m en full, at_phase u = COUNT -> 0 < w -> en || full = true -> (full = true -> en = false /\ window u <> []) ->
  transition (wide big c) r d (dress w false m u) (SamplesRead [] en full) = Some (dress 0 en m u).
Proof.
  intros big c r d u w m en full P Wp Ef Fu. rewrite read_event. destruct (dress_more_views w false m u) as [_ [_ [_ [_ [V1 [_ [_ [_ [_ [V2 V3]]]]]]]]]].
  rewrite V1, V2, V3. replace (w =? 0) with false by (symmetry; apply Nat.eqb_neq; lia). replace (w <? length (@nil sample)) with false by (symmetry; apply Nat.ltb_ge; simpl; lia).
  assert (G : is_nil (@nil sample) && negb en && negb full = false) by (destruct en, full; auto). rewrite G. cbn [orb].
  assert (Mf : full && negb (may_be_full [] en (dress w false m u)) = false).
  { destruct full; [|reflexivity]. destruct (Fu eq_refl) as [-> Nw]. unfold may_be_full. rewrite V2, V3.
    simpl. replace (0 <? w) with true by (symmetry; apply Nat.ltb_lt; lia). destruct (window u); [easy|reflexivity]. }
  rewrite Mf, Ef, (dress_read w 0 false en m u _ (wanted u)). simpl length. rewrite Nat.add_0_r, app_nil_r.
  assert (Eu : set_read (read u) (set_wanted (wanted u) (set_window (window u) u)) = u) by (destruct u; reflexivity). rewrite Eu.
  rewrite post_waiting; [reflexivity|]. unfold is_waiting. destruct (dress_views 0 en m u) as [-> _]. rewrite P. reflexivity.
Qed.

Lemma counted_followed : forall n big c r d u w e m cs share is_last t, read u <= n -> alike_posts (posted u) m ->
  (if share =? 0 then w = 0 /\ e = is_last else is_open n u w e) ->
  transition c r d (draws share is_last u) (Got (Counted cs)) = Some t ->
  exists m', transition (wide big c) r d (dress w e m u) (Got (Counted cs)) = Some (dress w e m' t) /\ alike_posts (posted t) m' /\ tied n t w e /\
    ended t = is_last /\ wanted t = share /\ read t = read u /\ round t = S (round u) /\ at_phase u = COUNT /\ at_phase t <> COUNT.
Proof.
  intros n big c r d u w e m cs share is_last t R A T E. cbn [transition] in *.
  change (at_phase (draws share is_last u)) with (at_phase u) in E. change (at_phase (dress w e m u)) with (at_phase u).
  destruct (at_phase u) eqn:P; try discriminate. unfold count in *.
  change (aligned (draws share is_last u)) with (aligned u) in E. change (aligned (dress w e m u)) with (aligned u).
  destruct (negb _); [discriminate|]. cbv zeta in *. injection E as E.
  match type of E with post c r ?v = t => set (u1 := v) in * end.
  assert (T1 : tied n u1 w e) by (unfold tied; subst u1; exact T).
  destruct (post_followed n big c r u1 w e m T1) as [m' [P1 [P2 P3]]]; [exact R|exact A|].
  exists m'. split; [|].
  - rewrite <- E, <- P1. reflexivity.
  - rewrite E in *. destruct P3 as [K1 [K2 [K3 [K4 [K5 K6]]]]]. rewrite K1, K2, K3, K5. split; [exact P2|].
    split; [apply (keeps_tied n u1); [exact T1|unfold keeps; auto 10]|]. repeat split.
    destruct K6 as [->|[_ [_ K6]]]; [discriminate|exact K6].
Qed.

Lemma alike_same : forall a b, alike_offer a b -> is_bad a = false -> o_stop_rank a = None -> b = a.
Proof.
  intros a b [->|[[L|L] _]] B St; [reflexivity| |contradiction]. unfold is_bad in B. destruct (o_failed a); [discriminate|contradiction].
Qed.

Lemma alike_bad : forall a b, alike_offer a b -> is_bad b = is_bad a /\ o_round_min b = o_round_min a /\ o_stop_rank b = o_stop_rank a /\ o_stop_step b = o_stop_step a.
Proof. intros a b [->|[_ [g ->]]]; repeat split. Qed.

Lemma agreed_followed : forall n big c r d u w e m a b t, tied n u w e -> alike_posts (posted u) m -> alike_offer a b ->
  (is_bad b = false -> o_ready b = true -> w = 0) ->
  handle_shared c r d u (Got (Agreed a)) = Some t -> n < big -> read u <= n ->
  exists w' e' m', transition (wide big c) r d (dress w e m u) (Got (Agreed b)) = Some (dress w' e' m' t) /\ alike_posts (posted t) m' /\
    ended t = ended u /\ wanted t = wanted u /\ read t = read u /\ round t = round u /\ at_phase u = OFFER /\
    (length (window t) <= read t -> tied n t w' e').
Proof.
  intros n big c r d u w e m a b t T A Al Rw E Big Rn. unfold handle_shared in E. cbn [transition] in *.
  change (at_phase (dress w e m u)) with (at_phase u). destruct (at_phase u) eqn:P; try discriminate.
  destruct (alike_bad _ _ Al) as [B1 [B2 [B3 B4]]]. unfold agree in *. rewrite B1, B2, B3, B4. change (round (dress w e m u)) with (round u).
  assert (P1 : at_phase u <> COUNT) by congruence. assert (P2 : at_phase u <> DONE) by congruence.
  destruct (is_bad a) eqn:B.
  - injection E as <-. do 3 eexists. split; [reflexivity|]. split; [left; reflexivity|]. repeat split.
    intros _. apply (keeps_tied n u); [exact T|]. unfold keeps. simpl. repeat split. right. rewrite P. repeat split; discriminate.
  - destruct (negb (o_round_min a =? round u)); [discriminate|]. destruct (o_stop_rank a) as [q|] eqn:St.
    + cbn [option_map] in E. rewrite asks_nothing_unless_counting in E by apply drain_not_counting. injection E as <-.
      exists w, e, m. split; [reflexivity|]. split; [exact A|]. do 5 (split; [reflexivity|]). intros _. exact (keeps_tied n u _ w e T (drain_keeps d _ _ (set_groups [] u) P1 P2)).
    + pose proof (alike_same a b Al B St) as ->. change (target (wide big c) a) with (target c a). destruct (negb (o_ready a)) eqn:Ra; [discriminate|].
      apply negb_false_iff in Ra. specialize (Rw B Ra). subst w.
      assert (Se : wanted u = 0 /\ e = ended u).
      { unfold tied, is_open in T. rewrite P in T. destruct (wanted u =? 0) eqn:Z; [apply Nat.eqb_eq in Z; destruct T as [_ ->]; auto|]. destruct T as [_ T]. lia. }
      destruct Se as [Wa En]. cbv zeta in *. destruct (target c a) as [|k].
      * cbn [option_map] in E. rewrite asks_nothing_unless_counting in E by apply drain_not_counting. injection E as <-.
        exists 0, e, m. split; [reflexivity|]. split; [exact A|]. do 5 (split; [reflexivity|]).
        intros _. exact (keeps_tied n u _ 0 e T (drain_keeps d Complete _ (set_released (released u ++ plan u) (set_plan [] (set_groups [] u))) P1 P2)).
      * change (c_align (wide big c) (round u) (groups (dress 0 e m u)) (S k) (due_before (wide big c) (dress 0 e m u))) with (c_align c (round u) (groups u) (S k) (due_before c u)).
        destruct (c_align c (round u) (groups u) (S k) (due_before c u)) as [al carried].
        match type of E with option_map _ (Some (deliver d ?x)) = _ => set (v := x) in * end.
        assert (Wd : asks_nothing (deliver d v) = set_wanted 0 (deliver d v)) by reflexivity. cbn [option_map] in E. rewrite Wd in E. injection E as <-.
        exists (if e then 0 else big - length carried), e, (Some (MCounts (map count_group al))). split; [reflexivity|]. split; [left; reflexivity|].
        split; [reflexivity|]. split; [symmetry; exact Wa|]. split; [reflexivity|]. split; [reflexivity|]. split; [reflexivity|].
        intros Lw. change (length carried <= read u) in Lw. split; [reflexivity|]. cbn -[length]. rewrite En. destruct (ended u); [auto|]. split; [reflexivity|]. cbn. lia.
Qed.
