(** REPLAY: the steps planned on a rank are a function of the samples, the shared configuration, the number of ranks, and how sources
    answer.

    [view] computes what a rank plans from the results of the exchange and its own input. It depends on no schedule, no depth and no way
    of splitting reads. [image] relates a rank's state to its [view]. Up to the result that ends the epoch, the results are made of offers
    that follow from [view] too. Two things about a source matter besides its samples: whether it reports its end with its last sample or
    only when asked for more, and how many of the next samples a window has room for. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol Ending Coupled Termination Age Prompt.
Import ListNotations.

Lemma counted_samples : forall k rd xs released cs n m, h_samples (mkHist k rd (xs ++ make_shared n m cs) released) = h_samples (mkHist k rd xs released) + total_samples cs.
Proof.
  intros k rd xs released cs n m. unfold h_samples, total_samples. simpl. rewrite sum_over_app, make_shared_samples. reflexivity.
Qed.

(** ** What a rank plans *)

(** How a source answers: whether it reports its end with its last sample, and whether a window that holds the given samples has room in
    bytes for the next one (R2.3). *)
Record reader := mkReader { is_eager : bool; has_room : list sample -> sample -> bool }.

(** How many of the next samples a window has room for. *)
Fixpoint room (src : reader) (w l : list sample) : nat :=
  match l with [] => 0 | x :: l' => if has_room src w x then S (room src (w ++ [x]) l') else 0 end.

Lemma room_after : forall src n l w, n <= room src w l -> room src w l = n + room src (w ++ firstn n l) (skipn n l).
Proof.
  induction n as [|n IH]; intros [|x l] w L; simpl in *; try lia; rewrite ?app_nil_r; try reflexivity. destruct (has_room src w x); [|lia].
  rewrite (IH l (w ++ [x])) by lia. rewrite <- app_assoc. reflexivity.
Qed.

Record view := mkView {
  v_window : list sample;   (* carried into the round *)
  v_read : nat;             (* read before it *)
  v_want : nat;             (* to be read for it *)
  v_ended : bool;
  v_marks : list nat;
  v_aligned : list group;
  v_steps : list Machine.step;
  v_budget : option nat }.   (* in force in the round *)

Section View.
Variables (c : config) (rank : nat) (src : reader) (inp : list sample).

Definition first_view : view := mkView [] 0 (c_window c rank 0) false [] [] [] (c_first c rank).

Definition unread (v : view) : list sample := skipn (v_read v) inp.
Definition asked (v : view) : nat := Nat.min (v_want v) (room src (v_window v) (unread v)).
Definition more (v : view) : list sample := if v_ended v then [] else firstn (asked v) (unread v).
Definition full_window (v : view) : list sample := v_window v ++ more v.
Definition full_read (v : view) : nat := v_read v + length (more v).
Definition full_ended (v : view) : bool :=
  v_ended v || (full_read v =? length inp) && (if is_eager src then 1 <=? v_want v else length (more v) <? v_want v).

Definition next_view (h : hist) (v : view) (x : result) : view :=
  match h_kind h, x with
  | NOffer, Agreed a =>
      if is_bad a then v else
      match o_stop_rank a, target c a with
      | None, Makes t =>
          let w := full_window v in
          let al := align_at c (h_round h) w (groups_at c (h_round h) (v_budget v) w) (due_of c (v_marks v)) t in
          mkView (snd al) (full_read v) (if full_ended v || c_shares c then 0 else c_window c rank (S (h_round h)) - length (snd al)) (full_ended v)
            (last_n (c_max_age c) (v_marks v ++ [full_read v])) (fst al) (v_steps v) (o_budget a)
      | _, _ => v
      end
  | NCount _, Counted cs =>
      mkView (v_window v) (v_read v) (v_want v) (v_ended v) (v_marks v) []
        (v_steps v ++ make_steps (length (h_steps h)) (h_round h) (firstn (cut c (h_samples h) cs) (v_aligned v)) cs) (v_budget v)
  | _, _ => v
  end.

Definition views (rs : list result) : hist * view := fold_left (fun p x => (h_step c (fst p) x, next_view (fst p) (snd p) x)) rs (h_initial, first_view).

Definition view_of (rs : list result) : view := snd (views rs).

Lemma views_history : forall rs, fst (views rs) = history c rs.
Proof.
  intros rs. unfold views, history_from. change (o_hist fresh) with (fst (h_initial, first_view)). generalize (h_initial, first_view).
  induction rs as [|x rs IH]; intros p; simpl; [reflexivity|]. rewrite IH. reflexivity.
Qed.

Lemma view_snoc : forall rs x, view_of (rs ++ [x]) = next_view (history c rs) (view_of rs) x.
Proof. intros rs x. unfold view_of, views. rewrite fold_left_app. simpl. fold (views rs). rewrite views_history. reflexivity. Qed.

Definition alive (h : hist) : Prop := match h_kind h with NOffer | NCount _ => True | _ => False end.

(** The window of a rank that is reading: the part so far of what the view wants. *)
Definition reading (v : view) (u : state) : Prop :=
  exists x, window u = v_window v ++ x /\ read u = v_read v + length x /\ x = firstn (length x) (unread v) /\ length x <= asked v /\
    if v_ended v then x = [] /\ ended u = true /\ wanted u = 0
    else if ended u then wanted u = 0 /\ read u = length inp /\ (if is_eager src then 1 <= v_want v else length x < v_want v)
    else (wanted u + length x = v_want v \/ (wanted u = 0 /\ length x = asked v /\ read u < length inp)) /\ (is_eager src = true -> x = [] \/ read u < length inp).

Lemma ready_is_full : forall v u, reading v u -> wanted u = 0 -> window u = full_window v /\ read u = full_read v /\ ended u = full_ended v.
Proof.
  intros v u [x [Wx [Rx [Fx [Lx C]]]]] Wa. unfold full_window, full_ended, full_read, more. destruct (v_ended v) eqn:E.
  - destruct C as [-> [E2 _]]. simpl in *. auto.
  - assert (Ln : length (unread v) = length inp - v_read v) by apply skipn_length. pose proof (Nat.le_min_l (v_want v) (room src (v_window v) (unread v))) as Lw. fold (asked v) in Lw.
    assert (X : x = firstn (asked v) (unread v)).
    { destruct (ended u).
      - destruct C as [_ [R _]]. rewrite Fx. rewrite !firstn_all2 by lia. reflexivity.
      - assert (Le : length x = asked v) by (destruct C as [[C|[_ [C _]]] _]; lia). rewrite <- Le. exact Fx. }
    rewrite <- X. split; [exact Wx|]. split; [exact Rx|]. cbn [orb]. rewrite <- Rx. destruct (ended u); symmetry.
    + destruct C as [_ [R C]]. apply andb_true_iff. split; [apply Nat.eqb_eq, R|]. destruct (is_eager src); [apply Nat.leb_le, C|apply Nat.ltb_lt, C].
    + apply andb_false_iff. destruct C as [[C|[_ [_ C]]] D]; [|left; apply Nat.eqb_neq; lia]. rewrite Wa in C. simpl in C. destruct (is_eager src).
      * destruct (D eq_refl) as [-> |D']; [right; simpl in C; rewrite <- C; reflexivity|left; apply Nat.eqb_neq; lia].
      * right. apply Nat.ltb_ge. lia.
Qed.

(** The offer of a ready rank. *)
Definition offer_of (h : hist) (v : view) (o : offer) : Prop :=
  let gs := groups_at c (h_round h) (v_budget v) (full_window v) in
  let held := if is_quota_met c (h_samples h) then 0 else held_of c (full_ended v) (full_window v) in
  o = mkOffer (h_round h) (h_round h) (c_print c) (c_print c) true None None None held held
        (if full_ended v || is_some (c_updates c) then None else Some (groups_to_emit c (v_budget v) gs)) (length gs) (count_due (due_of c (v_marks v)) gs) (c_accepts c rank (h_round h)).

Definition message_of (h : hist) (v : view) (m : msg) : Prop :=
  match h_kind h with
  | NOffer => is_quota_met c (h_samples h) = false /\ exists o, m = MOffer o /\ offer_of h v o
  | NCount _ => m = MCounts (map count_group (v_aligned v))
  | _ => True
  end.

Definition fair (u : state) : Prop := at_phase u = OFFER -> exists o, posted u = Some (MOffer o) /\ (o_stop_rank o = None -> o_stop_step o = None).

Record image (h : hist) (v : view) (u : state) : Prop := {
  i_steps : steps_of u = v_steps v;
  i_aligned : forall t, h_kind h = NCount t -> aligned u = v_aligned v;
  i_marks : alive h -> marks u = v_marks v;
  i_window : alive h -> is_quota_met c (h_samples h) = false -> reading v u;
  i_last : forall l, h_kind h = NClosed Complete l -> is_quota_met c (h_samples h) = false -> wanted u = 0 /\ window u = full_window v /\ aligned u = [] /\ ended u = full_ended v;
  i_offer : fair u;
  i_budget : alive h -> budget u = v_budget v }.

(** ** One rank *)

Definition part (u : state) := (marks u, aligned u, read u, ended u, wanted u, window u, budget u).

Lemma part_post : forall r u, part (post c r u) = part u /\ steps_of (post c r u) = steps_of u.
Proof. split; reflexivity. Qed.
Lemma part_is : forall t u, part t = part u -> marks t = marks u /\ aligned t = aligned u /\ budget t = budget u.
Proof. intros t u P. unfold part in P. injection P as P1 P2 _ _ _ _ P3. auto. Qed.
Lemma part_deliver : forall d u, part (deliver d u) = part u /\ steps_of (deliver d u) = steps_of u.
Proof. intros. split; [reflexivity|apply deliver_steps]. Qed.
Lemma post_fair : forall r u, fair u -> fair (post c r u).
Proof.
  intros r u H. destruct (post_eq c r u) as [[-> _]|[_ [_ ->]]]; [exact H|]. intros _. simpl. eexists. split; [reflexivity|]. simpl. destruct (stopped u); [discriminate|reflexivity].
Qed.

(** Events other than results and reads. *)
Lemma own_part : forall r d u e t, (forall x, e <> Got x) -> (forall xs en full, e <> SamplesRead xs en full) -> transition c r d u e = Some t ->
  part t = part u /\ steps_of t = steps_of u /\ (fair u -> fair t).
Proof.
  intros r d u e t NG NR E. pose proof (sa_steps _ _ (transition_same _ _ _ _ _ _ NG E)) as S. destruct (own_event _ _ _ _ _ _ NG E) as [[_ ->]|[-> _]]; [|auto].
  split; [destruct e; try reflexivity; edestruct NR; reflexivity|]. split; [exact S|]. intros F. apply post_fair. unfold fair in *.
  destruct (moved_phase d u e) as [-> |[_ ->]]; [|discriminate]. replace (posted (moved d u e)) with (posted u) by (destruct e; reflexivity). exact F.
Qed.

Lemma reading_part : forall v u t, part t = part u -> reading v u -> reading v t.
Proof. intros v u t P [x R]. unfold part in P. injection P as _ _ P3 P4 P5 P6 _. exists x. rewrite P3, P4, P5, P6. exact R. Qed.

Lemma image_part : forall h v u t, part t = part u -> steps_of t = steps_of u -> (fair u -> fair t) -> image h v u -> image h v t.
Proof.
  intros h v u t P S F [I1 I2 I3 I4 IL I5 IB]. constructor; [rewrite S; exact I1| | | | |auto|].
  - intros k K. unfold part in P. injection P as _ P _ _ _ _ _. rewrite P. exact (I2 k K).
  - intros A. unfold part in P. injection P as P _ _ _ _ _ _. rewrite P. exact (I3 A).
  - intros A Q. eapply reading_part; eauto.
  - intros l K Q. unfold part in P. injection P as _ P1 _ P4 P2 P3 _. rewrite P1, P2, P3, P4. exact (IL l K Q).
  - intros A. unfold part in P. injection P as _ _ _ _ _ _ P. rewrite P. exact (IB A).
Qed.

End View.

(** ** A rank, apart from what is released *)

(** Histories that differ only in how much is released, and so in the limit of a failure. No plan depends on that. A job that is loaded
    again has taken all steps of earlier rounds, but when it saved, the last of them may not have been released. *)
Definition same_kind (k k' : kind) : Prop := match k, k' with NClosed o _, NClosed o' _ => o = o' | _, _ => k = k' end.

Record alike (h h' : hist) : Prop := { al_kind : same_kind (h_kind h) (h_kind h'); al_round : h_round h = h_round h'; al_steps : h_steps h = h_steps h' }.

Lemma alike_samples : forall h h', alike h h' -> h_samples h = h_samples h'.
Proof. intros h h' A. unfold h_samples. rewrite (al_steps _ _ A). reflexivity. Qed.

Lemma alike_step : forall c h h' x, alike h h' -> alike (h_step c h x) (h_step c h' x).
Proof.
  intros c h h' x A. pose proof (alike_samples h h' A) as Es. destruct A as [K R S]. unfold h_step. rewrite <- Es, <- R, <- S. clear Es. destruct h as [k rd xs rel], h' as [k' rd' xs' rel']. simpl in *. subst rd' xs'.
  destruct k as [|t| |o l], k' as [|t'| |o' l']; simpl in K; try discriminate; destruct x as [a|cs|rs]; simpl;
    try (constructor; simpl; solve [reflexivity|assumption]).
  - destruct (is_bad a); [constructor; reflexivity|]. destruct (o_stop_rank a); [constructor; reflexivity|]. constructor; simpl; [|reflexivity|reflexivity]. destruct (target c a); reflexivity.
  - destruct (failure_of rs); constructor; reflexivity.
Qed.

Lemma alike_kind_ok : forall c h h' u, alike h h' -> kind_ok c c h' u -> kind_ok c c h u.
Proof.
  intros c h h' u A K. pose proof (al_kind _ _ A) as E. unfold kind_ok in *. destruct (at_phase u); unfold same_kind in E.
  1,2: rewrite K in E; destruct (h_kind h); congruence.
  - destruct K as [K _]. rewrite K in E. split; [destruct (h_kind h); congruence|reflexivity].
  - rewrite K in E. destruct (h_kind h); congruence.
  - destruct K as [o [l [K O]]]. rewrite K in E. destruct (h_kind h) as [| | |o' l']; try discriminate. subst o'. eauto.
  - destruct K as [o [l [K O]]]. rewrite K in E. destruct (h_kind h) as [| | |o' l']; try discriminate. subst o'. eauto.
Qed.

(** The invariant of a rank, as if another number of steps had been released. *)
Definition stands (c : config) (depth rank : nat) (inp : list sample) (h : hist) (u : state) : Prop :=
  exists h', alike h h' /\ core c c rank inp h' u /\ tight depth u.

Lemma stands_on : forall c d r inp h u, stands c d r inp h u ->
  round u = h_round h /\ kind_ok c c h u /\ planned u = length (h_steps h) /\ gsum u = h_samples h /\ exists h', core c c r inp h' u.
Proof.
  intros c d r inp h u [h' [A [K _]]]. rewrite (al_round _ _ A), (al_steps _ _ A), (alike_samples _ _ A). split; [apply (k_round _ _ _ _ _ _ K)|].
  split; [apply (alike_kind_ok c h h' u A), (k_kind _ _ _ _ _ _ K)|]. split; [apply (k_planned _ _ _ _ _ _ K)|]. split; [apply (k_gsum _ _ _ _ _ _ K)|]. eauto.
Qed.

(** ** The system *)

Section Replay.
Variables (W : nat) (c : config) (src : nat -> reader) (input : nat -> list sample).
Hypothesis ok : setting_ok W (fun _ => c).
Notation cfg := (fun _ : nat => c).

(** An eager source reports its end with its last sample, any other source when it is asked for more than it has. Each source reads only
    what there is room for, and reports a full window only if there is no room for the next sample. No order is shared. *)
Definition ends_alike (s : sys) (l : label) : Prop :=
  match l with
  | LRank r (SamplesRead xs en full) =>
      let u := rank_of s r in let left := room (src r) (window u) (skipn (read u) (input r)) in
      length xs <= left /\ (full = true -> length xs = left /\ read u + length xs < length (input r)) /\
      en = (if is_eager (src r) then read u + length xs =? length (input r) else negb full && (length xs <? wanted u))
  | LDrawn _ _ _ => False
  | _ => True
  end.

(** A run at the depth [depth]. *)
Inductive replays (depth : nat -> nat) : sys -> Prop :=
| replay_start : replays depth (start cfg)
| replay_step : forall s l t, replays depth s -> System.step W cfg depth input s l t -> ends_alike s l -> replays depth t.

Lemma replays_reachable : forall depth s, replays depth s -> reachable W cfg depth input s.
Proof. induction 1; [constructor|eapply reach_step; eauto]. Qed.

Notation history := (history c).
Notation view_at := (fun r rs => view_of c r (src r) (input r) rs).

Section Run.
Variable depth : nat -> nat.
Notation step := (System.step W cfg depth input).
Notation admissible_of := (may_admissible W cfg depth input (some_rank _ _ ok) (prints_differ _ _ ok)).

(** What every run of the epoch keeps, whether it begins there or is loaded. *)
Record basis (s : sys) : Prop := {
  bs_standing :> standing W cfg depth input s;
  bs_rank : forall r, r < W -> stands c (depth r) r (input r) (history (seen s r)) (rank_of s r) }.

Lemma step_keeps_basis : forall s l t, basis s -> step s l t -> basis t.
Proof.
  intros s l t I St. assert (X : forall r, r < W -> stands c (depth r) r (input r) (history (seen t r)) (rank_of t r)).
  { apply (each_rank_keeps W cfg depth input (fun r rs u => stands c (depth r) r (input r) (history rs) u) s l t I St);
      [intros r e u _ H M NG E [h [A [K T]]]|intros r x u H M E [h [A [K T]]]|intros r n la _ H D [h [A [K T]]]|exact (bs_rank s I)].
    1,2: assert (Nu : numbered_from 0 (h_steps h)) by (rewrite <- (al_steps _ _ A); apply history_numbered);
      destruct (every_transition_keeps_the_invariant_of_a_rank c c r (depth r) (input r) h (configs_ok _ _ ok r H) Nu _ _ u K T (admissible_of s r _ I H M) E) as [K' T'].
    - exists h. split; [exact A|]. split; [|exact T']. destruct e; try exact K'. edestruct NG. reflexivity.
    - exists (h_step c h x). rewrite history_snoc. split; [apply alike_step, A|auto].
    - exists h. split; [exact A|]. exact (drawing_keeps_the_invariant_of_a_rank W cfg depth input (some_rank _ _ ok) s r n la c h D K T). }
  constructor; [constructor|exact X].
  - intros r H. destruct (X r H) as [h [_ KT]]. exists h. exact KT.
  - exact (every_step_keeps_sync W cfg depth input (some_rank _ _ ok) s l t (g_sync _ _ _ _ _ I) St).
  - exact (every_step_keeps_the_log W cfg depth input s l t I St).
Qed.

(** What a good agreement implies for the offer of every rank. *)
Lemma all_are_ready : forall s a, basis s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some (Agreed a) -> is_bad a = false -> o_stop_rank a = None ->
  exists os, agreement_of a os /\ (forall r, r < W -> exists o, In o os /\ at_phase (rank_of s r) = OFFER /\ posted (rank_of s r) = Some (MOffer o) /\ o_ready o = true /\ offer_ok c r (rank_of s r) o) /\
  (o_samples_max a <> 0 -> is_quota_met c (h_samples (history (results s))) = false).
Proof.
  intros s a I P Rd B Sr. destruct (pending_offers W cfg depth input s a I P Rd) as [os [A [_ [X Y]]]]. exists os. split; [exact A|].
  pose proof (ready_agreement W cfg s a os A B Sr Y) as Ra. split.
  - intros r H. destruct (X r H) as [o [Io [Ph [Po O]]]]. exists o. repeat (split; [assumption|]). split; [exact (ag_ready _ _ A o Io Ra)|exact O].
  - intros NZ. destruct (at_samples _ _ A) as [o [Ho Eo]]. destruct (Y o Ho) as [r [H [_ [_ O]]]]. destruct (of_ready _ _ _ _ O (ag_ready _ _ A o Ho Ra)) as [_ [_ [_ [Os _]]]].
    destruct (stands_on _ _ _ _ _ _ (bs_rank s I r H)) as [_ [_ [_ [Kg _]]]]. destruct (pending_sync W cfg depth input s r I H (P r H)) as [Se _]. rewrite Se in Kg. rewrite Kg in Os.
    destruct (is_quota_met c (h_samples (history (results s)))); [congruence|reflexivity].
Qed.

Lemma read_keeps_image : forall s r xs en full t, basis s -> r < W -> may cfg input s r (SamplesRead xs en full) -> ends_alike s (LRank r (SamplesRead xs en full)) ->
  transition c r (depth r) (rank_of s r) (SamplesRead xs en full) = Some t ->
  forall h v, image c (src r) (input r) h v (rank_of s r) -> image c (src r) (input r) h v t.
Proof.
  intros s r xs en full t I H [M1 [M2 _]] [Al1 [Al2 Al]] E h v [I1 I2 I3 I4 IL I5 IB]. set (u := rank_of s r) in *. simpl in E. fold u in Al, Al1, Al2.
  destruct (wanted u =? 0) eqn:W0; [discriminate|]. destruct (wanted u <? length xs) eqn:Wl; [discriminate|]. simpl in E.
  destruct (_ || _) eqn:Nl in E; [discriminate|]. apply orb_false_iff in Nl as [_ Mb]. injection E as <-.
  apply Nat.eqb_neq in W0. apply Nat.ltb_ge in Wl. set (w := set_read _ _). destruct (part_post c r w) as [P1 P2].
  constructor; [rewrite P2; exact I1| | | |intros l K Q; destruct (IL l K Q); contradiction|apply post_fair, I5|].
  4:{ intros A. rewrite (proj2 (proj2 (part_is _ _ P1))). exact (IB A). }
  - intros k K. rewrite (proj1 (proj2 (part_is _ _ P1))). exact (I2 k K).
  - intros A. rewrite (proj1 (part_is _ _ P1)). exact (I3 A).
  - intros A Q. apply (reading_part _ _ v w); [exact P1|]. destruct (I4 A Q) as [x [Wx [Rx [Fx [Lx C]]]]].
    assert (Lxs : length xs <= length (input r) - read u) by (rewrite M1, firstn_length, skipn_length; lia).
    destruct (bs_rank s I r H) as [h' [_ [K' _]]]. pose proof (k_read _ _ _ _ _ _ K') as Kr. fold u in Kr.
    destruct (v_ended v) eqn:Ve; [destruct C as [_ [_ C]]; contradiction|]. destruct (ended u) eqn:Eu; [destruct C as [C _]; contradiction|].
    destruct C as [[C|[C _]] D]; [|contradiction]. pose proof (room_after (src r) (length x) (unread (input r) v) (v_window v) ltac:(unfold asked in Lx; lia)) as Ra.
    rewrite <- Fx, <- Wx in Ra. unfold unread in Ra at 2. rewrite <- skipn_more, <- Rx in Ra.
    exists (x ++ xs). simpl. rewrite app_length. split; [rewrite Wx, app_assoc; reflexivity|]. split; [lia|]. split.
    { rewrite firstn_add, <- Fx. f_equal. rewrite M1 at 1. rewrite Rx. unfold unread. rewrite skipn_more. reflexivity. }
    assert (La : asked (src r) (input r) v = Nat.min (wanted u + length x) (length x + room (src r) (window u) (skipn (read u) (input r)))) by (unfold asked; rewrite Ra, C; reflexivity).
    split; [lia|]. rewrite Ve. destruct en.
    + split; [reflexivity|]. split; [apply M2; reflexivity|]. destruct (is_eager (src r)); [lia|]. destruct full; [discriminate|]. symmetry in Al. apply Nat.ltb_lt in Al. lia.
    + split.
      * destruct full; [right|left; simpl; lia]. destruct (Al2 eq_refl) as [A1 A2]. unfold may_be_full in Mb. simpl. split; [reflexivity|]. split; [|lia].
        rewrite Eu in Mb. simpl in Mb. apply negb_false_iff, andb_true_iff in Mb as [Mb _]. apply Nat.ltb_lt in Mb. lia.
      * intros Eg. rewrite Eg in Al. symmetry in Al. apply Nat.eqb_neq in Al. right. lia.
Qed.

Lemma dead_image : forall h v u t e inp, ~ alive h -> (forall k, h_kind h <> NCount k) -> (forall l, h_kind h <> NClosed Complete l) -> image c e inp h v u \/ steps_of u = v_steps v -> steps_of t = steps_of u -> at_phase t <> OFFER -> image c e inp h v t.
Proof.
  intros h v u t e inp D K Nc I S P. constructor; [rewrite S; destruct I as [I|I]; [apply (i_steps _ _ _ _ _ _ I)|exact I]| | | | | |].
  - intros k Hk. exfalso. apply (K k Hk).
  - intros A. contradiction.
  - intros A. contradiction.
  - intros l Hk. contradiction (Nc l Hk).
  - intros X. contradiction.
  - intros A. contradiction.
Qed.

Definition images (s : sys) : Prop := forall r, r < W -> image c (src r) (input r) (history (seen s r)) (view_at r (seen s r)) (rank_of s r).

(** An exchange that does not end the epoch, or that completes it before the quota is met. *)
Definition plain (h h' : hist) : Prop := alive h' \/ ((exists l, h_kind h' = NClosed Complete l) /\ is_quota_met c (h_samples h) = false).

Definition log_says (s : sys) : Prop := forall i ms x, nth_error (log s) i = Some (ms, x) -> plain (history (firstn i (results s))) (history (firstn (S i) (results s))) ->
  forall r m, nth_error ms r = Some m -> message_of c r (src r) (input r) (history (firstn i (results s))) (view_at r (firstn i (results s))) m.

Lemma answer_keeps_image : forall s r x t, basis s -> log_says s -> r < W -> may cfg input s r (Got x) -> transition c r (depth r) (rank_of s r) (Got x) = Some t ->
  let h := history (seen s r) in let v := view_at r (seen s r) in
  image c (src r) (input r) h v (rank_of s r) -> image c (src r) (input r) (h_step c h x) (next_view c r (src r) (input r) h v x) t.
Proof.
  intros s r x t I Lg H M E h v Im. pose proof (admissible_of s r _ I H M) as Ad. destruct (sync_answer s r _ (g_sync _ _ _ _ _ I r H) (proj1 M) (proj1 (proj2 M))) as [_ [_ [ms [El Em]]]].
  destruct (stands_on _ _ _ _ _ _ (bs_rank s I r H)) as [Kr [Kk [Kp [Kg [h' K]]]]]. fold h in Kr, Kk, Kp, Kg. unfold kind_ok in Kk.
  set (u := rank_of s r) in *. destruct Im as [I1 I2 I3 I4 _ I5 IB]. destruct x as [a|cs|rs]; simpl in E; destruct (at_phase u) eqn:Ph; try discriminate.
  - destruct Ad as [_ Ar]. unfold agree in E. unfold h_step, next_view. rewrite Kk. destruct (is_bad a) eqn:B.
    { injection E as <-. apply (dead_image _ _ u); [intros A; exact A|discriminate|discriminate|right; exact I1|reflexivity|discriminate]. }
    destruct (negb _); [discriminate|]. destruct (o_stop_rank a) as [q|] eqn:Sr.
    { injection E as <-. apply (dead_image _ _ u); [intros A; exact A|discriminate|discriminate|right; exact I1|etransitivity; [apply drain_steps|reflexivity]|].
      drains. }
    destruct (o_ready a) eqn:Ra; [|discriminate]. simpl in E. destruct (target c a) as [|n] eqn:Ta.
    { injection E as <-. match goal with |- image _ _ _ _ _ (drain ?d ?o ?l ?w) => assert (Da : aligned (drain d o l w) = aligned w) by reflexivity; assert (Dw : window (drain d o l w) = window w) by reflexivity; assert (Dn : wanted (drain d o l w) = wanted w) by reflexivity; assert (De : ended (drain d o l w) = ended w) by reflexivity; pose proof (drain_phase d o l w) as Dp end.
      constructor; [rewrite drain_steps; etransitivity; [unfold steps_of; simpl; rewrite app_nil_r; reflexivity|exact I1]
        |discriminate|intros []|intros []| |intros X; destruct Dp; congruence|intros []].
      intros l _ Q. change (is_quota_met c (h_samples h) = false) in Q. destruct (k_offer _ _ _ _ _ _ K Ph) as [o [Po Oo]]. destruct (of_ready _ _ _ _ Oo (Ar eq_refl o Po)) as [_ [W0 _]].
      assert (Al : alive h) by (unfold alive; rewrite Kk; exact Logic.I). destruct (ready_is_full _ _ v u (I4 Al Q) W0) as [Fw [_ Fe]].
      rewrite Da, Dw, Dn, De. split; [exact W0|]. split; [exact Fw|]. split; [|exact Fe]. apply (k_aligned _ _ _ _ _ _ K). rewrite Ph. discriminate. }
    assert (Qm : is_quota_met c (h_samples h) = false).
    { assert (A : alive (history (firstn (S (got s r)) (results s)))).
      { rewrite (firstn_snoc _ _ _ _ (proj1 (proj2 M))), history_snoc. change (history (firstn (got s r) (results s))) with h. unfold alive, h_step. rewrite Kk, B, Sr, Ta. exact Logic.I. }
      pose proof (Lg _ _ _ El (or_introl A) r _ Em) as Ms. change (history (firstn (got s r) (results s))) with h in Ms. unfold message_of in Ms. rewrite Kk in Ms. apply Ms. }
    destruct (k_offer _ _ _ _ _ _ K Ph) as [o [Po Oo]]. pose proof (Ar eq_refl o Po) as Ro. destruct (of_ready _ _ _ _ Oo Ro) as [_ [W0 [Gs _]]].
    assert (Al : alive h) by (unfold alive; rewrite Kk; exact Logic.I).
    destruct (ready_is_full _ _ v u (I4 Al Qm) W0) as [Fw [Fr Fe]].
    assert (Du : due_before c u = due_of c (v_marks v)) by (unfold due_before, due_of; rewrite (I3 Al); reflexivity).
    rewrite Gs, Fw, Du, Kr, (IB Al) in E. cbv zeta. destruct (align_at c (h_round h) _ _ _ n) as [al ca] eqn:Ea. injection E as <-.
    match goal with |- image _ _ _ _ _ (deliver ?d ?z) => set (w := z) in *; destruct (part_deliver d w) as [P1 P2] end.
    constructor.
    + rewrite P2. simpl. rewrite <- I1. unfold w, steps_of. simpl. rewrite app_nil_r. reflexivity.
    + intros k Hk. rewrite (proj1 (proj2 (part_is _ _ P1))). reflexivity.
    + intros _. rewrite (proj1 (part_is _ _ P1)). simpl. rewrite (I3 Al), Fr. reflexivity.
    + intros _ _. apply (reading_part _ _ _ w); [exact P1|]. exists []. simpl. rewrite app_nil_r. split; [reflexivity|]. split; [rewrite <- Fr; lia|]. split; [reflexivity|]. split; [lia|].
      rewrite <- Fe. destruct (ended u) eqn:Eu; [auto|]. split; [lia|]. intros _. left. reflexivity.
    + intros l Hk. discriminate.
    + unfold fair. destruct (deliver_same (depth r) w) as [-> _]. discriminate.
    + intros _. rewrite (proj2 (proj2 (part_is _ _ P1))). reflexivity.
  - destruct Kk as [Kk _]. unfold count in E. destruct (length cs =? length (aligned u)) eqn:L; [|discriminate]. apply Nat.eqb_eq in L. simpl in E. injection E as <-.
    pose proof (k_plan _ _ _ _ _ _ K Ph) as Kl.
    assert (Al : alive h) by (unfold alive; rewrite Kk; exact Logic.I). pose proof (I2 _ Kk) as Ia.
    match goal with |- image _ _ _ _ _ (post c r ?z) => set (w := z) in *; destruct (part_post c r w) as [P1 P2] end.
    unfold h_step, next_view. rewrite Kk. constructor.
    + rewrite P2. simpl. rewrite <- I1, <- Ia, <- Kg, <- Kr, <- Kp. unfold w, steps_of. simpl. rewrite Kl, app_nil_r, <- !app_assoc. reflexivity.
    + discriminate.
    + intros _. rewrite (proj1 (part_is _ _ P1)). exact (I3 Al).
    + intros _ Q. apply (reading_part _ _ _ w); [exact P1|].
      rewrite counted_samples in Q.
      assert (Q0 : is_quota_met c (h_samples h) = false).
      { unfold is_quota_met in *. destruct (c_quota c) as [q|]; [|reflexivity]. apply Nat.leb_gt in Q. apply Nat.leb_gt. unfold h_samples in *. simpl in Q. lia. }
      assert (Cu : cut c (h_samples h) cs = length cs).
      { pose proof (cut_le c (h_samples h) cs). destruct (Nat.eq_dec (cut c (h_samples h) cs) (length cs)) as [X|X]; [exact X|]. assert (Y : cut c (h_samples h) cs < length cs) by lia.
        apply cut_reaches in Y. exfalso. unfold h_samples in Y, Q. simpl in Q. unfold h_samples in Q. congruence. }
      assert (Re : concat (skipn (cut c (gsum u) cs) (aligned u)) = []) by (rewrite Kg, Cu, L, skipn_all; reflexivity).
      destruct (I4 Al Q0) as [x X]. exists x. unfold w. simpl. rewrite Re. simpl. exact X.
    + intros l Hk. discriminate.
    + apply post_fair. unfold fair, w. discriminate.
    + intros _. rewrite (proj2 (proj2 (part_is _ _ P1))). exact (IB Al).
  - destruct (failure_of rs) as [o|] eqn:Fo; [|discriminate]. injection E as <-. unfold h_step, next_view. rewrite Kk, Fo.
    apply (dead_image _ _ u); [intros A; exact A|discriminate|intros l Hk; injection Hk as -> _; exact (failure_of_kind _ _ Fo)|right; exact I1|etransitivity; [apply drain_steps|reflexivity]|].
    drains.
Qed.

Lemma start_images : images (start cfg).
Proof.
  intros r H. unfold seen. simpl. constructor; simpl; auto; try discriminate; [|apply post_fair; unfold fair; discriminate].
  intros _ _. exists []. simpl. repeat split; auto; try lia.
Qed.

Lemma step_keeps_images : forall s l t, basis s -> log_says s -> step s l t -> ends_alike s l -> images s -> images t.
Proof.
  intros s l t I Lg St Al Im. unfold images. apply (each_rank_keeps W cfg depth input (fun r rs u => image c (src r) (input r) (history rs) (view_at r rs) u) s l t I St); [| | |exact Im].
  - intros r e u El H M NG E Ir. subst l. destruct e as [xs en full| |y| | |cause|]; [eapply read_keeps_image; eauto| |edestruct NG; reflexivity|..];
      (destruct (own_part c r (depth r) _ _ u NG ltac:(discriminate) E) as [P1 [P2 P3]]; eapply image_part; eauto).
  - intros r x u H M E. rewrite history_snoc, view_snoc. exact (answer_keeps_image s r x u I Lg H M E).
  - intros r n la El. subst l. destruct Al.
Qed.

(** In such an exchange, each rank's message is the one that its view determines. *)
Lemma exchange_says : forall s t, basis s -> images s -> step s LExchange t -> plain (whole cfg s) (whole cfg t) ->
  forall r m, nth_error (messages W s) r = Some m -> message_of c r (src r) (input r) (whole cfg s) (view_at r (results s)) m.
Proof.
  intros s t I Im St Al r m Hm. inversion St as [|s' x P Rd| |]; subst.
  assert (H : r < W) by (rewrite <- (messages_length W s); apply nth_error_Some; congruence). rewrite messages_nth in Hm by exact H. injection Hm as <-.
  destruct (pending_sync W cfg depth input s r I H (P r H)) as [Se [_ Wa]]. pose proof (Im r H) as Ir. destruct (stands_on _ _ _ _ _ _ (bs_rank s I r H)) as [Kr [Kk [_ [Kg [h' K]]]]].
  rewrite Se in Ir, Kr, Kk, Kg. change (history (results s)) with (whole cfg s) in Ir, Kr, Kk, Kg. unfold kind_ok in Kk.
  unfold message_of, message. unfold is_waiting in Wa. destruct (at_phase (rank_of s r)) eqn:Ph; try discriminate.
  - rewrite Kk. destruct (k_offer _ _ _ _ _ _ K Ph) as [o [Po Oo]]. rewrite Po.
    pose proof (messages_nth W s r H) as Hm. unfold message in Hm. rewrite Po in Hm.
    pose proof (reduce_says _ _ _ Rd (nth_error_In _ _ Hm)) as Say. destruct x as [a|cs|rs]; [|destruct Say|destruct Say].
    rewrite whole_snoc in Al. unfold plain, alive, h_step in Al. rewrite Kk in Al.
    destruct (is_bad a) eqn:B; [destruct Al as [[]|[[l Al] _]]; discriminate|]. destruct (o_stop_rank a) as [q|] eqn:Sr; [destruct Al as [[]|[[l Al] _]]; discriminate|].
    destruct (all_are_ready s a I P Rd B Sr) as [os [A [F1 F2]]]. destruct (F1 r H) as [o' [Iy [_ [Po' [Ro _]]]]]. rewrite Po in Po'. injection Po' as <-.
    destruct (of_ready _ _ _ _ Oo Ro) as [_ [W0 [Gs [Os [Og [Om Od]]]]]].
    assert (Qm : is_quota_met c (h_samples (whole cfg s)) = false).
    { simpl in Al. destruct (target c a) as [|n] eqn:Ta; [destruct Al as [[]|[_ Q]]; exact Q|].
      apply F2, (target_makes _ _ _ Ta). }
    split; [exact Qm|]. exists o. split; [reflexivity|].
    assert (Ah : alive (whole cfg s)) by (unfold alive; rewrite Kk; exact Logic.I).
    destruct (ready_is_full _ _ _ _ (i_window _ _ _ _ _ _ Ir Ah Qm) W0) as [Fw [Fr Fe]].
    destruct (i_offer _ _ _ _ _ _ Ir Ph) as [o2 [Po2 Ss]]. rewrite Po in Po2. injection Po2 as <-.
    assert (Nf : o_failed o = None) by (destruct (o_failed o) eqn:X; [exfalso; apply (ag_failed _ _ A o Iy); [congruence|apply (not_bad a B)]|reflexivity]).
    assert (Ns : o_stop_rank o = None) by (destruct (o_stop_rank o) eqn:X; [exfalso; apply (ag_stop _ _ A o Iy); congruence|reflexivity]).
    specialize (Ss Ns). destruct (of_round _ _ _ _ Oo) as [Or1 Or2]. destruct (of_print _ _ _ _ Oo) as [Op1 Op2]. pose proof (of_samples _ _ _ _ Oo) as Om2.
    rewrite Kr in Or1, Or2. rewrite Kg in Os. pose proof (of_budget _ _ _ _ Oo) as Ob. rewrite Kr in Ob.
    assert (Du : due_before c (rank_of s r) = due_of c (v_marks (view_at r (results s)))) by (unfold due_before, due_of; rewrite (i_marks _ _ _ _ _ _ Ir Ah); reflexivity).
    unfold offer_of. rewrite <- Fw, <- Fe, <- Du. rewrite Gs, Kr, (i_budget _ _ _ _ _ _ Ir Ah) in Og, Om, Od. clear - Os Og Om Od Ob Om2 Or1 Or2 Op1 Op2 Ro Nf Ns Ss Qm. destruct o. simpl in *. subst. reflexivity.
  - rewrite (k_count _ _ _ _ _ _ K Ph). destruct Kk as [Kk _]. rewrite Kk. rewrite (i_aligned _ _ _ _ _ _ Ir _ Kk). reflexivity.
  - rewrite Kk. exact Logic.I.
Qed.

Lemma step_keeps_log_says : forall s l t, basis s -> step s l t -> images s -> log_says s -> log_says t.
Proof.
  intros s l t I St Im L. pose proof St as St0. destruct St as [s i e t Hi M E|s x P Rd|s i Hi Ru Tk|s d m la Hd Dr]; [exact L| |exact L|exact L].
  intros i ms y Hi Al r m Hm. match type of Al with plain _ (history (firstn _ (results ?z))) => assert (Er : results z = results s ++ [x]) by (unfold results; simpl; apply map_app) end.
  rewrite Er in *. simpl in Hi. assert (Ln : length (results s) = length (log s)) by (unfold results; apply map_length).
  assert (F : forall n, n <= length (log s) -> firstn n (results s ++ [x]) = firstn n (results s)).
  { intros n Hn. rewrite firstn_app. replace (n - length (results s)) with 0 by lia. rewrite firstn_O. apply app_nil_r. }
  destruct (Nat.lt_ge_cases i (length (log s))) as [Li|Li].
  - rewrite nth_error_app1 in Hi by exact Li. rewrite !F in Al by lia. rewrite F by lia. apply (L i ms y Hi Al r m Hm).
  - assert (X : i = length (log s)) by (apply Nat.le_antisymm; [|exact Li]; assert (Y : i < length (log s ++ [(messages W s, x)])) by (apply nth_error_Some; congruence); rewrite app_length in Y; simpl in Y; lia). subst i.
    rewrite nth_error_app2, Nat.sub_diag in Hi by lia. injection Hi as <- <-. rewrite (F (length (log s)) (le_n _)) in *. rewrite (firstn_all2 (n := S (length (log s)))) in Al by (rewrite app_length; simpl; lia).
    rewrite firstn_all2 in * by lia. refine (exchange_says s _ I Im St0 _ r m Hm). unfold whole. rewrite Er. exact Al.
Qed.

(** A complete run was alive until its last exchange, an agreement that closes. *)
Definition complete_at_last (s : sys) : Prop := forall l, h_kind (whole cfg s) = NClosed Complete l ->
  exists n, length (log s) = S n /\ h_kind (history (firstn n (results s))) = NOffer /\
  exists a, nth_error (results s) n = Some (Agreed a) /\ target c a = Closes.

Lemma step_keeps_complete_at_last : forall s l t, basis s -> step s l t -> complete_at_last s -> complete_at_last t.
Proof.
  intros s lb t I St IH l Hk. destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk|s d m la Hd Dr]; [exact (IH l Hk)| |exact (IH l Hk)..]. rewrite whole_snoc in Hk. exists (length (log s)). simpl. split; [rewrite app_length; simpl; lia|].
  unfold results. simpl. rewrite map_app, firstn_app, map_length, Nat.sub_diag, firstn_O, app_nil_r, firstn_all2 by (rewrite map_length; lia).
  change (h_kind (whole cfg s) = NOffer /\ exists a, nth_error (map snd (log s) ++ [x]) (length (log s)) = Some (Agreed a) /\ target c a = Closes).
  unfold h_step in Hk. destruct (h_kind (whole cfg s)) as [|k| |o l'] eqn:K; [| exfalso | exfalso | exfalso].
  - split; [reflexivity|]. destruct x as [a|cs|rs]; simpl in Hk; try congruence. exists a. split; [rewrite nth_error_app2, map_length, Nat.sub_diag by (rewrite map_length; lia); reflexivity|].
    destruct (is_bad a) eqn:B; [discriminate|]. destruct (o_stop_rank a) eqn:Sr; [discriminate|]. simpl in Hk. destruct (target c a); [reflexivity|discriminate].
  - destruct x; simpl in Hk; congruence.
  - destruct x as [a|cs|rs]; simpl in Hk; try congruence. destruct (failure_of rs) as [o|] eqn:Fo; [|congruence]. simpl in Hk. injection Hk as -> _. apply failure_of_kind in Fo. exact Fo.
  - pose proof (some_rank _ _ ok) as SR. destruct (pending_sync W cfg depth input s 0 I ltac:(lia) (P 0 ltac:(lia))) as [Wa [_ Wt]].
    destruct (stands_on _ _ _ _ _ _ (bs_rank s I 0 ltac:(lia))) as [_ [Kk _]]. rewrite Wa in Kk. change (history (results s)) with (whole cfg s) in Kk. pose proof (phase_of_kind _ _ _ _ Kk) as Ph. rewrite K in Ph. unfold is_waiting in Wt. destruct Ph as [Ph|Ph]; rewrite Ph in Wt; discriminate.
Qed.

(** Everything that every run of the epoch keeps and the rest of this file needs. *)
Record tells (s : sys) : Prop := {
  tell_basis : basis s;
  tell_images : images s;
  tell_log : log_says s;
  tell_tail : complete_at_last s }.

Lemma step_keeps_tells : forall s l t, tells s -> step s l t -> ends_alike s l -> tells t.
Proof.
  intros s l t [I Im L C] St Al. constructor.
  - apply (step_keeps_basis s l t I St).
  - apply (step_keeps_images s l t I L St Al Im).
  - apply (step_keeps_log_says s l t I St Im L).
  - apply (step_keeps_complete_at_last s l t I St C).
Qed.

Lemma start_tells : tells (start cfg).
Proof.
  pose proof (initial_invariant W cfg depth input (some_rank _ _ ok) (configs_ok _ _ ok)) as I. constructor; [|apply start_images| |].
  - constructor; [exact I|]. intros r H. eexists.
    split; [constructor; auto; unfold same_kind; destruct (h_kind _); reflexivity|]. split; [apply (g_core _ _ _ _ _ I r H)|apply (g_tight _ _ _ _ _ I r H)].
  - intros i ms x Hi. destruct i; discriminate.
  - intros l Hk. discriminate.
Qed.

Lemma replays_tell : forall s, replays depth s -> tells s.
Proof. induction 1 as [|s l t Rp Ts St Al]; [apply start_tells|eapply step_keeps_tells; eauto]. Qed.

Lemma got_some : forall s r, tells s -> r < W -> got s r <= length (log s).
Proof. intros s r Ts H. destruct (g_sync _ _ _ _ _ (tell_basis s Ts) r H) as [[_ [G _]]|[[_ [G _]]|[_ [G _]]]]; lia. Qed.

Lemma ended_tells : forall s r, tells s -> r < W -> is_ending (rank_of s r) = true ->
  got s r = length (log s) /\ exists o l, h_kind (whole cfg s) = NClosed o l /\ ended_as (rank_of s r) = Some o.
Proof.
  intros s r Ts H E. pose proof (tell_basis s Ts) as I. assert (G : got s r = length (log s)).
  { unfold is_ending in E. destruct (g_sync _ _ _ _ _ I r H) as [[_ [G _]]|[[_ [_ [Wa _]]]|[_ [G _]]]]; [exact G| |exact G]. exfalso. unfold is_waiting in Wa. destruct (at_phase (rank_of s r)); discriminate. }
  split; [exact G|]. destruct (stands_on _ _ _ _ _ _ (bs_rank s I r H)) as [_ [K _]]. rewrite (seen_current s r G) in K. change (history (results s)) with (whole cfg s) in K.
  unfold kind_ok in K. unfold is_ending in E. destruct (at_phase (rank_of s r)); try discriminate; exact K.
Qed.

End Run.

(** ** Two runs *)

Lemma dead_stays : forall h x, ~ alive h -> ~ alive (h_step c h x).
Proof.
  intros h x D A. apply D. unfold alive in *. unfold h_step in A. destruct (h_kind h) eqn:K; auto; destruct x; simpl in A; rewrite ?K in A; auto.
  destruct (failure_of rs); simpl in A; rewrite ?K in A; exact A.
Qed.

Lemma alive_or_not : forall h, alive h \/ ~ alive h.
Proof. intros h. unfold alive. destruct (h_kind h); auto. Qed.

Lemma no_steps_in_death : forall r e inp h v x, ~ alive (h_step c h x) -> v_steps (next_view c r e inp h v x) = v_steps v.
Proof.
  intros r e inp h v x D. unfold next_view, alive, h_step in *. destruct (h_kind h), x; auto; [|exfalso; apply D; exact Logic.I].
  destruct (is_bad a); [reflexivity|]. destruct (o_stop_rank a); [reflexivity|]. destruct (target c a); reflexivity.
Qed.

Lemma steps_grow : forall r e inp h v x, exists ext, v_steps (next_view c r e inp h v x) = v_steps v ++ ext.
Proof.
  intros r e inp h v x. unfold next_view. destruct (h_kind h), x; try (exists []; rewrite app_nil_r; reflexivity); [|eexists; reflexivity].
  destruct (is_bad a); [exists []; rewrite app_nil_r; reflexivity|]. destruct (o_stop_rank a); [exists []; rewrite app_nil_r; reflexivity|].
  destruct (target c a); exists []; rewrite app_nil_r; reflexivity.
Qed.

Definition is_prefix {A} (a b : list A) : Prop := exists ext, b = a ++ ext.

Lemma prefix_trans : forall A (x y z : list A), is_prefix x y -> is_prefix y z -> is_prefix x z.
Proof. intros A x y z [e ->] [f ->]. exists (e ++ f). symmetry. apply app_assoc. Qed.
Lemma prefix_refl : forall A (x : list A), is_prefix x x.
Proof. intros A x. exists []. symmetry. apply app_nil_r. Qed.

Notation steps_at := (fun r n rs => v_steps (view_at r (firstn n rs))).

Lemma prefix_next : forall r n rs, is_prefix (steps_at r n rs) (steps_at r (S n) rs).
Proof.
  intros r n rs. destruct (nth_error rs n) as [x|] eqn:E.
  - rewrite (firstn_snoc _ _ _ x E), view_snoc. destruct (steps_grow r (src r) (input r) (history (firstn n rs)) (view_at r (firstn n rs)) x) as [ext X]. exists ext. exact X.
  - apply nth_error_None in E. rewrite !firstn_all2 by lia. apply prefix_refl.
Qed.

Lemma prefix_later : forall r rs n m, n <= m -> is_prefix (steps_at r n rs) (steps_at r m rs).
Proof. intros r rs n m L. induction L as [|m L IH]; [apply prefix_refl|]. eapply prefix_trans; [exact IH|apply prefix_next]. Qed.

Lemma dead_next : forall r rs n, ~ alive (history (firstn (S n) rs)) -> steps_at r (S n) rs = steps_at r n rs.
Proof.
  intros r rs n D. destruct (nth_error rs n) as [x|] eqn:E.
  - rewrite (firstn_snoc _ _ _ x E), history_snoc in D. rewrite (firstn_snoc _ _ _ x E), view_snoc. apply no_steps_in_death, D.
  - apply nth_error_None in E. rewrite !firstn_all2 by lia. reflexivity.
Qed.

Lemma dead_after : forall rs n m, n <= m -> ~ alive (history (firstn n rs)) -> ~ alive (history (firstn m rs)).
Proof.
  intros rs n m L D. induction L as [|m L IH]; [exact D|]. destruct (nth_error rs m) as [x|] eqn:E.
  - rewrite (firstn_snoc _ _ _ x E), history_snoc. apply dead_stays, IH.
  - apply nth_error_None in E. rewrite firstn_all2 in IH by lia. rewrite firstn_all2 by lia. exact IH.
Qed.

Lemma dead_later : forall r rs n m, n <= m -> ~ alive (history (firstn n rs)) -> steps_at r m rs = steps_at r n rs.
Proof.
  intros r rs n m L D. induction L as [|m L IH]; [reflexivity|]. rewrite dead_next; [exact IH|]. apply (dead_after rs n); [lia|exact D].
Qed.

Lemma message_is_determined : forall h v r e inp m m', alive h -> message_of c r e inp h v m -> message_of c r e inp h v m' -> m = m'.
Proof.
  intros h v r e inp m m' A M M'. unfold message_of, alive in *. destruct (h_kind h); try contradiction; [|congruence].
  destruct M as [_ [o [-> O]]]. destruct M' as [_ [o' [-> O']]]. unfold offer_of in *. congruence.
Qed.

Lemma alive_before : forall rs n m, n <= m -> alive (history (firstn m rs)) -> alive (history (firstn n rs)).
Proof. intros rs n m L A. destruct (alive_or_not (history (firstn n rs))) as [B|B]; [exact B|]. exfalso. apply (dead_after rs n m L B A). Qed.

Lemma same_next : forall d d' s s' n, tells d s -> tells d' s' -> n < length (log s) -> n < length (log s') -> firstn n (results s) = firstn n (results s') ->
  alive (history (firstn n (results s'))) ->
  plain (history (firstn n (results s))) (history (firstn (S n) (results s))) -> plain (history (firstn n (results s'))) (history (firstn (S n) (results s'))) ->
  firstn (S n) (results s) = firstn (S n) (results s').
Proof.
  intros d d' s s' n [I _ L _] [I' _ L' _] Ln Ln' Same B' A A'.
  destruct (nth_error (log s) n) as [[ms x]|] eqn:E; [|apply nth_error_None in E; lia]. destruct (nth_error (log s') n) as [[ms' x']|] eqn:E'; [|apply nth_error_None in E'; lia].
  pose proof (results_nth _ _ _ E) as Ex. pose proof (results_nth _ _ _ E') as Ex'. simpl in Ex, Ex'.
  rewrite (firstn_snoc _ _ _ _ Ex), (firstn_snoc _ _ _ _ Ex'), Same. f_equal. f_equal.
  destruct (log_entry W cfg d input s n _ I E) as [Lm [Rd _]]. destruct (log_entry W cfg d' input s' n _ I' E') as [Lm' [Rd' _]]. simpl in *.
  assert (Em : ms = ms').
  { apply nth_error_ext. intros r. destruct (nth_error ms r) as [m|] eqn:Hm.
    - assert (Hr : r < W) by (rewrite <- Lm; apply nth_error_Some; congruence). destruct (nth_error ms' r) as [m'|] eqn:Hm'; [|apply nth_error_None in Hm'; lia]. f_equal.
      pose proof (L n ms x E A r m Hm) as X. pose proof (L' n ms' x' E' A' r m' Hm') as X'. rewrite Same in X. apply (message_is_determined _ _ _ _ _ m m' B' X X').
    - apply nth_error_None in Hm. symmetry. apply nth_error_None. lia. }
  subst ms'. congruence.
Qed.

Lemma same_results : forall d d' s s', tells d s -> tells d' s' -> forall n, n <= length (log s) -> n <= length (log s') ->
  alive (history (firstn n (results s))) -> alive (history (firstn n (results s'))) -> firstn n (results s) = firstn n (results s').
Proof.
  intros d d' s s' Rp Rp'. induction n as [|n IH]; intros Ln Ln' A A'; [reflexivity|].
  pose proof (alive_before _ n (S n) (Nat.le_succ_diag_r n) A) as B. pose proof (alive_before _ n (S n) (Nat.le_succ_diag_r n) A') as B'.
  apply (same_next d d' s s' n Rp Rp' Ln Ln' (IH ltac:(lia) ltac:(lia) B B') B'); left; assumption.
Qed.

(** The steps that a rank plans in one of two runs begin those it plans in the other; they are the same if both runs are complete. *)
Definition plan_alike (runs : (nat -> nat) -> sys -> Prop) : Prop := forall d d' s s' r, runs d s -> runs d' s' -> r < W ->
  is_prefix (steps_of (rank_of s r)) (steps_of (rank_of s' r)) \/ is_prefix (steps_of (rank_of s' r)) (steps_of (rank_of s r)).
Definition complete_alike (runs : (nat -> nat) -> sys -> Prop) : Prop := forall d d' s s' r, runs d s -> runs d' s' -> r < W ->
  is_ending (rank_of s r) = true -> is_ending (rank_of s' r) = true -> ended_as (rank_of s r) = Some Complete -> ended_as (rank_of s' r) = Some Complete ->
  steps_of (rank_of s r) = steps_of (rank_of s' r).

Lemma what_two_runs_tell : plan_alike tells.
Proof.
  intros d d' s s' r Rp Rp' H. pose proof (tell_images d s Rp) as Im. pose proof (tell_images d' s' Rp') as Im'.
  rewrite (i_steps _ _ _ _ _ _ (Im r H)), (i_steps _ _ _ _ _ _ (Im' r H)). unfold seen.
  pose proof (got_some d s r Rp H) as G. pose proof (got_some d' s' r Rp' H) as G'.
  assert (X : forall k, k <= got s r -> k <= got s' r -> firstn k (results s) = firstn k (results s') \/
    exists j, j < k /\ firstn j (results s) = firstn j (results s') /\ (~ alive (history (firstn (S j) (results s))) \/ ~ alive (history (firstn (S j) (results s'))))).
  { induction k as [|k IH]; intros Lk Lk'; [left; reflexivity|]. destruct (IH ltac:(lia) ltac:(lia)) as [E|[j [Lj J]]]; [|right; exists j; split; [lia|exact J]].
    destruct (alive_or_not (history (firstn (S k) (results s)))) as [A|A]; [|right; exists k; auto].
    destruct (alive_or_not (history (firstn (S k) (results s')))) as [A'|A']; [|right; exists k; auto].
    left. apply (same_results d d' s s' Rp Rp'); auto; lia. }
  assert (Dead : forall rs rs' j n n', j < n -> j < n' -> firstn j rs = firstn j rs' -> ~ alive (history (firstn (S j) rs)) -> is_prefix (steps_at r n rs) (steps_at r n' rs')).
  { intros rs rs' j n n' L L' E D. rewrite (dead_later r rs (S j) n L D), (dead_next r rs j D), E. apply (prefix_later r rs'). lia. }
  destruct (X (Nat.min (got s r) (got s' r)) ltac:(lia) ltac:(lia)) as [E|[j [Lj [E [D|D]]]]]; [|left; apply (Dead _ _ j); auto; lia|right; apply (Dead _ _ j); auto; lia].
  destruct (Nat.le_ge_cases (got s r) (got s' r)) as [L|L];
    [left; rewrite Nat.min_l in E by exact L; rewrite E|right; rewrite Nat.min_r in E by exact L; rewrite <- E]; apply prefix_later, L.
Qed.

(** REPLAY. Take two runs on the same samples with the same configuration and number of ranks. Whatever their schedules, depths and splits
    of reads, and whatever fails or stops, the steps planned on a rank in one run begin those planned in the other. *)
Theorem the_steps_planned_do_not_depend_on_the_schedule : plan_alike replays.
Proof. intros d d' s s' r Rp Rp' H. apply (what_two_runs_tell d d'); auto using replays_tell. Qed.

Lemma no_longer : forall d d' s s' n n' l, tells d s -> tells d' s' -> length (log s) = S n -> length (log s') = S n' ->
  h_kind (whole cfg s) = NClosed Complete l -> h_kind (history (firstn n (results s))) = NOffer -> h_kind (history (firstn n' (results s'))) = NOffer -> ~ n < n'.
Proof.
  intros d d' s s' n n' l Rp Rp' Ln Ln' Hk K K' Lt.
  assert (A : alive (history (firstn n (results s)))) by (unfold alive; rewrite K; exact Logic.I). assert (A' : alive (history (firstn n' (results s')))) by (unfold alive; rewrite K'; exact Logic.I).
  pose proof (alive_before _ n n' ltac:(lia) A') as B'. pose proof (alive_before _ (S n) n' ltac:(lia) A') as C'.
  pose proof (same_results d d' s s' Rp Rp' n ltac:(lia) ltac:(lia) A B') as Same. pose proof (tell_log d' s' Rp') as L'.
  assert (Wh : history (firstn (S n) (results s)) = whole cfg s) by (rewrite firstn_all2; [reflexivity|unfold results; rewrite map_length; lia]).
  destruct (nth_error (log s') n) as [[ms' x']|] eqn:E'; [|apply nth_error_None in E'; lia].
  destruct (log_entry W cfg d' input s' n _ (tell_basis d' s' Rp') E') as [Lm' _]. simpl in Lm'.
  destruct (nth_error ms' 0) as [m'|] eqn:Hm'; [|apply nth_error_None in Hm'; pose proof (some_rank _ _ ok); lia].
  pose proof (L' n ms' x' E' (or_introl C') 0 m' Hm') as X. unfold message_of in X. rewrite <- Same, K in X. destruct X as [Q _].
  assert (Y : firstn (S n) (results s) = firstn (S n) (results s')).
  { apply (same_next d d' s s' n Rp Rp'); [lia|lia|exact Same|exact B'| |left; exact C']. right. rewrite Wh. split; [eauto|exact Q]. }
  rewrite <- Y, Wh in C'. unfold alive in C'. rewrite Hk in C'. exact C'.
Qed.

Lemma what_two_complete_runs_tell : complete_alike tells.
Proof.
  intros d d' s s' r Rp Rp' H E E' O O'. pose proof (tell_images d s Rp) as Im. pose proof (tell_images d' s' Rp') as Im'.
  destruct (ended_tells d s r Rp H E) as [G [o [l [Hk X]]]]. rewrite O in X. injection X as <-. destruct (ended_tells d' s' r Rp' H E') as [G' [o' [l' [Hk' X']]]]. rewrite O' in X'. injection X' as <-.
  destruct (tell_tail d s Rp l Hk) as [n [Ln [K _]]]. destruct (tell_tail d' s' Rp' l' Hk') as [n' [Ln' [K' _]]].
  pose proof (no_longer d d' s s' n n' l Rp Rp' Ln Ln' Hk K K') as X1. pose proof (no_longer d' d s' s n' n l' Rp' Rp Ln' Ln Hk' K' K) as X2. assert (n' = n) by lia. subst n'.
  rewrite (i_steps _ _ _ _ _ _ (Im r H)), (i_steps _ _ _ _ _ _ (Im' r H)). unfold seen. rewrite G, G', Ln, Ln'.
  assert (D : ~ alive (history (firstn (S n) (results s)))) by (rewrite firstn_all2 by (unfold results; rewrite map_length; lia); change (~ alive (whole cfg s)); unfold alive; rewrite Hk; auto).
  assert (D' : ~ alive (history (firstn (S n) (results s')))) by (rewrite firstn_all2 by (unfold results; rewrite map_length; lia); change (~ alive (whole cfg s')); unfold alive; rewrite Hk'; auto).
  rewrite (dead_next r _ n D), (dead_next r _ n D'). do 2 f_equal. apply (same_results d d' s s' Rp Rp' n); try lia; unfold alive; [rewrite K|rewrite K']; exact Logic.I.
Qed.

Theorem complete_runs_have_planned_the_same_steps : complete_alike replays.
Proof. intros d d' s s' r Rp Rp'. apply (what_two_complete_runs_tell d d'); auto using replays_tell. Qed.

End Replay.
