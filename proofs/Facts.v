(** What the whole system keeps beyond each rank's invariant: some rank has work in every step, a report has a cause,
    an epoch closes only when it is complete, and the global counts are true. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Types Alignment Machine Local Rank System.
Import ListNotations.

(** Every assumption about the ranks, in one place. *)
Record setting_ok (W : nat) (cfg : nat -> config) : Prop := {
  some_rank : 1 <= W;
  configs_ok : forall r, r < W -> config_ok (cfg r);
  prints_differ : forall r q, r < W -> q < W -> c_print (cfg r) = c_print (cfg q) -> cfg r = cfg q }.

(** ** Frames: what a transition leaves as it was *)

Definition groups_of (s : state) : list group := map s_group (steps_of s) ++ aligned s.

Record same (s t : state) : Prop := {
  sa_steps : steps_of t = steps_of s;
  sa_aligned : aligned t = aligned s;
  sa_plan : plan t = plan s;
  sa_window : wanted s = 0 -> window t = window s /\ wanted t = 0;
  sa_failure : failure s <> None -> failure t = failure s;
  sa_collated : collated s = true -> collated t = true;
  sa_outcome : ended_as t = ended_as s;
  sa_round : round t = round s;
  sa_budget : budget t = budget s;
  sa_taken : exists x, taken t = taken s ++ x }.

Lemma same_refl : forall s, same s s.
Proof. intros. constructor; auto. exists []. rewrite app_nil_r. reflexivity. Qed.

Lemma same_post : forall c r s t, same s t -> same s (post c r t).
Proof. intros c r s t H. destruct (post_eq c r t) as [[-> _]|[_ [_ ->]]]; [assumption|]. destruct H. constructor; simpl; auto. Qed.

Lemma same_finish : forall s t, same s t -> same s (finish_when_drained t).
Proof. intros s t H. destruct (finish_eq t) as [p [-> _]]. destruct H. constructor; simpl; auto. Qed.

Lemma same_deliver : forall d s t, same s t -> same s (deliver d t).
Proof.
  intros d s t H. pose proof (deliver_steps d t) as [S1 S2]. destruct (deliver_eq d t) as [a [b [_ [E _]]]]. rewrite E in *. destruct H. constructor; simpl; auto. rewrite S1. assumption.
Qed.

Lemma transition_same : forall c r d s e t, (forall x, e <> Got x) -> transition c r d s e = Some t -> same s t.
Proof.
  intros c r d s e t NG E. destruct e as [xs en full| |x| | |cause|]; simpl in E.
  - destruct (wanted s =? 0) eqn:Wa; [discriminate|]. destruct (_ <? _); [discriminate|]. simpl in E. destruct (is_nil xs && negb en && negb full); [discriminate|]. destruct (full && _); [discriminate|]. injection E as <-. apply same_post. apply Nat.eqb_neq in Wa.
    constructor; simpl; auto; [intros; contradiction|]. exists []. rewrite app_nil_r. reflexivity.
  - destruct (collated s); [discriminate|]. injection E as <-. apply same_post. constructor; simpl; auto. exists []. rewrite app_nil_r. reflexivity.
  - exfalso. eapply NG. reflexivity.
  - destruct (queue s) as [|x q] eqn:Q; [discriminate|]. destruct (below _ _); [|discriminate]. injection E as <-.
    assert (T : same s (deliver d (set_taken (taken s ++ [x]) (set_queue q s)))).
    { apply same_deliver. constructor; simpl; auto; [|eauto]. unfold steps_of. simpl. rewrite Q, <- app_assoc. reflexivity. }
    destruct (at_phase _); try (apply same_post; exact T). apply same_finish, T.
  - assert (T : forall l, same s (set_limit l (set_stopped true s))) by (intros l; constructor; simpl; auto; exists []; rewrite app_nil_r; reflexivity).
    cbv zeta in E. change (at_phase (set_limit _ _)) with (at_phase s) in E.
    destruct (at_phase s) eqn:P; try (injection E as <-; apply same_refl); (destruct (stopped s); injection E as <-; [apply same_refl|]);
    try (apply same_post, T). apply same_finish, T.
  - destruct (is_ending s); [injection E as <-; apply same_refl|]. destruct (failure s) eqn:F; simpl in E; injection E as <-; [apply same_refl|].
    apply same_post. constructor; simpl; auto; [congruence|]. exists []. rewrite app_nil_r. reflexivity.
  - destruct (is_ending s); injection E as <-; [apply same_refl|]. apply same_post. constructor; simpl; auto. exists []. rewrite app_nil_r. reflexivity.
Qed.

Lemma drain_same : forall d o l g s, steps_of (drain d o l (set_groups g s)) = steps_of s /\ aligned (drain d o l (set_groups g s)) = aligned s /\
  window (drain d o l (set_groups g s)) = window s /\ wanted (drain d o l (set_groups g s)) = wanted s /\ failure (drain d o l (set_groups g s)) = failure s /\
  taken (drain d o l (set_groups g s)) = taken s /\ plan (drain d o l (set_groups g s)) = plan s /\ stopped (drain d o l (set_groups g s)) = stopped s.
Proof.
  intros. unfold drain. match goal with |- context[finish_when_drained ?u] => destruct (finish_eq u) as [p [-> _]] end.
  match goal with |- context[deliver d ?u] => pose proof (deliver_steps d u) as [S1 _]; destruct (deliver_eq d u) as [x [y [_ [E _]]]] end.
  rewrite E in *. unfold steps_of in *. simpl in *. repeat split; auto.
Qed.

Lemma drain_same_plain : forall d o l s, steps_of (drain d o l s) = steps_of s /\ aligned (drain d o l s) = aligned s /\
  window (drain d o l s) = window s /\ wanted (drain d o l s) = wanted s /\ failure (drain d o l s) = failure s /\
  taken (drain d o l s) = taken s /\ plan (drain d o l s) = plan s /\ stopped (drain d o l s) = stopped s.
Proof. intros. replace s with (set_groups (groups s) s) at 1 3 5 7 9 11 13 15 by (destruct s; reflexivity). apply drain_same. Qed.

Lemma drain_round : forall d o l s, round (drain d o l s) = round s.
Proof.
  intros. unfold drain. match goal with |- context[finish_when_drained ?u] => destruct (finish_eq u) as [p [-> _]] end.
  match goal with |- context[deliver d ?u] => destruct (deliver_eq d u) as [x [y [_ [E _]]]] end. rewrite E. reflexivity.
Qed.

Lemma agree_round : forall c rank d a s t, agree c rank d a s = Some t -> round t = round s.
Proof.
  intros c rank d a s t E. unfold agree in E. destruct (is_bad a); [injection E as <-; reflexivity|].
  destruct (negb _); [discriminate|]. destruct (o_stop_rank a); [injection E as <-; rewrite drain_round; reflexivity|].
  destruct (negb _); [discriminate|]. destruct (target c a) as [|n]; [injection E as <-; rewrite drain_round; reflexivity|].
  destruct (c_align c (round s) (groups s) (S n) (due_before c s)) as [al ca]. injection E as <-.
  match goal with |- context[deliver d ?u] => destruct (deliver_eq d u) as [x [y [_ [E _]]]] end. rewrite E. reflexivity.
Qed.

Lemma agree_budget : forall c rank d a s t, agree c rank d a s = Some t -> at_phase t = COUNT -> budget t = o_budget a.
Proof.
  intros c rank d a s t E P. unfold agree in E. destruct (is_bad a); [injection E as <-; discriminate|].
  destruct (negb _); [discriminate|]. destruct (o_stop_rank a).
  { injection E as <-. match type of P with at_phase (drain ?d ?o ?l ?u) = _ => destruct (drain_phase d o l u) as [X|X]; rewrite X in P; discriminate end. }
  destruct (negb _); [discriminate|]. destruct (target c a) as [|n].
  { injection E as <-. match type of P with at_phase (drain ?d ?o ?l ?u) = _ => destruct (drain_phase d o l u) as [X|X]; rewrite X in P; discriminate end. }
  destruct (c_align c (round s) (groups s) (S n) (due_before c s)) as [al ca]. injection E as <-.
  match goal with |- context[deliver d ?u] => destruct (deliver_eq d u) as [x [y [_ [E _]]]] end. rewrite E. reflexivity.
Qed.

Lemma count_budget : forall c rank cs s t, count c rank cs s = Some t -> budget t = budget s /\ round t = S (round s).
Proof.
  intros c rank cs s t E. unfold count in E. destruct (negb _); [discriminate|]. injection E as <-.
  match goal with |- context[post c rank ?u] => destruct (post_eq c rank u) as [[-> _]|[_ [_ ->]]] end; split; reflexivity.
Qed.

(** The four things an agreement can do. *)
Inductive agreed (c : config) (rank : nat) (a : offer) (s t : state) : Prop :=
| agreed_bad : is_bad a = true -> at_phase t = REPORT -> posted t = Some (MReport (mkReport rank (failure s) (round s) (c_print c))) ->
    plan t = plan s -> agreed c rank a s t
| agreed_stop : forall q, is_bad a = false -> o_stop_rank a = Some q -> at_phase t = DRAIN \/ at_phase t = DONE -> plan t = plan s -> agreed c rank a s t
| agreed_complete : is_bad a = false -> o_stop_rank a = None -> o_ready a = true -> target c a = 0 -> at_phase t = DRAIN \/ at_phase t = DONE -> plan t = [] ->
    agreed c rank a s t
| agreed_count : forall n, is_bad a = false -> o_stop_rank a = None -> o_ready a = true -> target c a = S n -> at_phase t = COUNT -> plan t = [] ->
    aligned t = fst (c_align c (round s) (groups s) (S n) (due_before c s)) -> window t = snd (c_align c (round s) (groups s) (S n) (due_before c s)) ->
    agreed c rank a s t.

Lemma agree_cases : forall c rank d a s t, agree c rank d a s = Some t ->
  agreed c rank a s t /\ steps_of t = steps_of s /\ failure t = failure s /\ taken t = taken s /\
  (at_phase t <> COUNT -> aligned t = aligned s /\ window t = window s /\ wanted t = wanted s).
Proof.
  intros c rank d a s t E. unfold agree in E. destruct (is_bad a) eqn:B.
  - injection E as <-. split; [apply agreed_bad; auto|]. repeat split; auto.
  - destruct (negb _); [discriminate|]. destruct (o_stop_rank a) as [q|] eqn:Sr.
    + injection E as <-. match goal with |- context[drain d ?o ?l (set_groups ?g s)] => pose proof (drain_same d o l g s) as D; pose proof (drain_phase d o l (set_groups g s)) as P end.
      destruct D as [D1 [D2 [D3 [D4 [D5 [D6 [D7 D8]]]]]]]. split; [eapply agreed_stop; eauto|]. repeat split; assumption || (intros _; assumption) || auto.
    + destruct (o_ready a) eqn:R; [|discriminate]. simpl in E.
      assert (St : steps_of (set_outbox (outbox s ++ plan s) (set_plan [] s)) = steps_of s) by (unfold steps_of; simpl; rewrite app_nil_r; reflexivity).
      destruct (target c a) as [|n] eqn:T.
      * injection E as <-. change (set_outbox (outbox s ++ plan s) (set_plan [] (set_groups [] s))) with (set_groups [] (set_outbox (outbox s ++ plan s) (set_plan [] s))).
        set (u := set_outbox (outbox s ++ plan s) (set_plan [] s)) in *.
        destruct (drain_same d Complete (planned s) [] u) as [D1 [D2 [D3 [D4 [D5 [D6 [D7 D8]]]]]]]. pose proof (drain_phase d Complete (planned s) (set_groups [] u)) as P.
        split; [apply agreed_complete; auto|]. rewrite D1, D2, D3, D4, D5, D6. repeat split; assumption || auto.
      * destruct (c_align c (round s) (groups s) (S n) (due_before c s)) as [al ca] eqn:Ea. injection E as <-.
        match goal with |- context[deliver d ?u] => pose proof (deliver_steps d u) as [D1 _]; destruct (deliver_eq d u) as [x [y [_ [Eq _]]]]; destruct (deliver_same d u) as [D2 [D3 D4]] end.
        split; [eapply agreed_count with (n := n); auto; rewrite ?Ea, ?Eq; auto|].
        split; [rewrite D1; exact St|]. rewrite D2. split; [rewrite Eq; reflexivity|]. split; [exact D4|]. simpl. intros X. exfalso. apply X. reflexivity.
Qed.

Lemma count_cases : forall c rank cs s t, count c rank cs s = Some t ->
  length cs = length (aligned s) /\ aligned t = [] /\ failure t = failure s /\ taken t = taken s /\ (at_phase t = FILL \/ at_phase t = OFFER) /\
  (plan s = [] -> exists new, steps_of t = steps_of s ++ new /\ map s_group new = firstn (cut c (gsum s) cs) (aligned s) /\ plan t = new).
Proof.
  intros c rank cs s t E. unfold count in E. destruct (length cs =? length (aligned s)) eqn:L; [|discriminate]. apply Nat.eqb_eq in L. simpl in E. injection E as <-.
  match goal with |- context[post c rank ?u] => set (u0 := u); assert (X : same u0 (post c rank u0)) by (apply same_post, same_refl);
    assert (P : at_phase (post c rank u0) = FILL \/ at_phase (post c rank u0) = OFFER) by (destruct (post_phase c rank u0) as [-> |[_ ->]]; auto);
    assert (F : failure (post c rank u0) = failure s) by (destruct (post_eq c rank u0) as [[-> _]|[_ [_ ->]]]; reflexivity);
    assert (Tk : taken (post c rank u0) = taken s) by (destruct (post_eq c rank u0) as [[-> _]|[_ [_ ->]]]; reflexivity) end.
  split; [assumption|]. split; [rewrite (sa_aligned _ _ X); reflexivity|]. split; [assumption|]. split; [assumption|]. split; [assumption|].
  intros Pl. exists (make_steps (planned s) (round s) (firstn (cut c (gsum s) cs) (aligned s)) cs). split; [rewrite (sa_steps _ _ X); unfold steps_of, u0; simpl; rewrite Pl, app_nil_r, !app_assoc; reflexivity|].
  split; [|rewrite (sa_plan _ _ X); reflexivity]. apply make_steps_groups. rewrite firstn_length. pose proof (cut_le c (gsum s) cs). lia.
Qed.

Lemma make_steps_round : forall gs cs n rd, Forall (fun x => s_round x = rd) (make_steps n rd gs cs).
Proof. induction gs as [|g gs IH]; intros [|x cs] n rd; simpl; constructor; auto. Qed.

(** The steps that a rank plans are of the round that it has counted. *)
Lemma count_rounds : forall c rank cs s t, count c rank cs s = Some t -> plan s = [] ->
  exists new, steps_of t = steps_of s ++ new /\ map s_group new = firstn (cut c (gsum s) cs) (aligned s) /\ Forall (fun x => s_round x = round s) new.
Proof.
  intros c rank cs s t E Pl. unfold count in E. destruct (length cs =? length (aligned s)) eqn:L; [|discriminate]. apply Nat.eqb_eq in L. simpl in E. injection E as <-.
  match goal with |- context[post c rank ?u] => set (u0 := u); assert (X : same u0 (post c rank u0)) by (apply same_post, same_refl) end.
  exists (make_steps (planned s) (round s) (firstn (cut c (gsum s) cs) (aligned s)) cs). split; [|split; [|apply make_steps_round]].
  - rewrite (sa_steps _ _ X). unfold steps_of, u0. simpl. rewrite Pl, app_nil_r, !app_assoc. reflexivity.
  - apply make_steps_groups. rewrite firstn_length. pose proof (cut_le c (gsum s) cs). lia.
Qed.

(** ** Sums *)

Definition sum_counts (l : list counts) : counts := fold_left add_counts l zero_counts.

Lemma nth_add_costs : forall r a b, nth r (add_costs a b) 0 = nth r a 0 + nth r b 0.
Proof. intros r a. revert r. induction a as [|x a IH]; intros [|r] [|y b]; simpl; try lia. apply IH. Qed.
Lemma nth_costs_of_group : forall r g, nth r (n_costs (count_group g)) 0 = used r g.
Proof. intros r. induction g as [|x g IH]; simpl; [destruct r; reflexivity|]. rewrite nth_add_costs. simpl in IH. rewrite IH. reflexivity. Qed.

Lemma add_counts_zero : forall a, add_counts zero_counts a = a.
Proof. intros []. reflexivity. Qed.

Lemma fold_add_samples : forall l a, n_samples (fold_left add_counts l a) = n_samples a + sum_nat (map n_samples l).
Proof. induction l as [|x l IH]; simpl; intros a; [lia|]. rewrite IH. simpl. lia. Qed.

Lemma sum_nat_positive : forall (f : nat -> nat) l, 0 < sum_nat (map f l) <-> exists q, In q l /\ 0 < f q.
Proof.
  intros f. induction l as [|x l IH]; simpl.
  - split; [lia|intros [q [[] _]]].
  - split.
    + intros P. destruct (f x) eqn:F; [|exists x; split; [left; reflexivity|lia]]. apply IH in P as [q [Hq P]]. exists q. auto.
    + intros [q [[<-|Hq] P]]; [lia|]. assert (0 < sum_nat (map f l)) by (apply IH; exists q; auto). lia.
Qed.

Lemma fold_add_costs : forall r l a, nth r (n_costs (fold_left add_counts l a)) 0 = nth r (n_costs a) 0 + sum_nat (map (fun c => nth r (n_costs c) 0) l).
Proof. induction l as [|x l IH]; simpl; intros a; [lia|]. rewrite IH. simpl. rewrite nth_add_costs. lia. Qed.

Lemma add_lists_nth : forall a b j, length a = length b -> nth j (add_lists a b) zero_counts = add_counts (nth j a zero_counts) (nth j b zero_counts).
Proof.
  induction a as [|x a IH]; intros [|y b] j L; simpl in *; try discriminate; [destruct j; reflexivity|]. destruct j; [reflexivity|]. apply IH. congruence.
Qed.

Lemma fold_lists_nth : forall l a j, Forall (fun c => length c = length a) l ->
  nth j (fold_left add_lists l a) zero_counts = fold_left add_counts (map (fun c => nth j c zero_counts) l) (nth j a zero_counts).
Proof.
  induction l as [|c l IH]; simpl; intros a j F; [reflexivity|]. inversion F; subst. rewrite IH.
  - rewrite add_lists_nth by auto. reflexivity.
  - rewrite add_lists_length by auto. assumption.
Qed.

Lemma nth_map_group : forall gs j, nth j (map count_group gs) zero_counts = count_group (nth j gs []).
Proof. intros. change zero_counts with (count_group []). apply map_nth. Qed.

(** ** Offers that are ready *)

(** Of one group or more at least one is to be emitted, no more than there are, and at most one fewer. *)
Lemma groups_to_emit_bounds : forall c b gs, 1 <= length gs -> 1 <= groups_to_emit c b gs <= length gs /\ length gs <= S (groups_to_emit c b gs).
Proof. intros c b gs L. unfold groups_to_emit. destruct (Nat.ltb_spec 1 (length gs)), (c_keeps c b gs); simpl; lia. Qed.

(** What the offer of a rank that is ready says of its groups. *)
Record measured (o : offer) : Prop := {
  me_groups : o_groups_max o <= o_samples_max o;
  me_some : 1 <= o_samples_max o -> 1 <= o_groups_max o;
  me_due : o_due_max o <= o_groups_max o;
  me_min : forall g, o_groups_min o = Some g -> 1 <= g <= o_groups_max o }.

(** A rank that reads on has a sample in its window, and so a group. *)
Lemma ready_groups_to_emit : forall c c0 r inp h u o g, config_ok c -> core c c0 r inp h u -> offer_ok c r u o -> o_ready o = true -> o_groups_min o = Some g ->
  1 <= g <= o_groups_max o /\ o_groups_max o <= S g.
Proof.
  intros c c0 r inp h u o g OK K O Ro Eg. destruct (of_ready _ _ _ _ O Ro) as [_ [R2 [R3 [_ [R5 [R6 _]]]]]]. rewrite R6 in Eg.
  destruct (ended u) eqn:En; [discriminate|]. injection Eg as <-. rewrite R5. apply groups_to_emit_bounds. rewrite R3.
  destruct (k_window _ _ _ _ _ _ K) as [Wa|Wa]; [congruence|]. rewrite R2 in Wa.
  pose proof (Permutation_length (ok_group_perm _ OK (budget u) (window u))). destruct (c_group c (budget u) (window u)); simpl in *; lia.
Qed.

Lemma ready_measured : forall c c0 r inp h u o, config_ok c -> core c c0 r inp h u -> offer_ok c r u o -> o_ready o = true -> is_quota_met c (gsum u) = false -> measured o.
Proof.
  intros c c0 r inp h u o OK K O Ro U. destruct (of_ready _ _ _ _ O Ro) as [R1 [R2 [R3 [R4 [R5 [R6 R7]]]]]]. rewrite U in R4.
  pose proof (Permutation_length (ok_group_perm _ OK (budget u) (window u))) as Lp. constructor.
  - rewrite R5, R4, R3, <- Lp. pose proof (ok_group_nonempty _ OK (budget u) (window u)) as NE. clear - NE.
    induction NE as [|g gs Hg Hgs IH]; simpl; [lia|]. rewrite app_length. destruct g; [easy|]. simpl. lia.
  - rewrite R4, R5, R3. intros L. destruct (c_group c (budget u) (window u)); simpl in *; lia.
  - rewrite R7, R5. apply count_due_le.
  - intros g Eg. apply (ready_groups_to_emit c c0 r inp h u o g); assumption.
Qed.

Lemma sane_agreement : forall a os, agreement_of a os -> (forall o, In o os -> measured o) -> o_samples_max a <> 0 -> sane a.
Proof.
  intros a os A M NZ. constructor; [lia| | |].
  - destruct (at_groups _ _ A) as [o [Ho Eo]]. pose proof (me_groups _ (M o Ho)). destruct (ag_samples _ _ A o Ho) as [_ S2]. split; [|lia].
    destruct (at_samples _ _ A) as [o2 [Ho2 Eo2]]. pose proof (me_some _ (M o2 Ho2)). pose proof (ag_groups _ _ A o2 Ho2). lia.
  - destruct (at_due _ _ A) as [o [Ho Eo]]. pose proof (me_due _ (M o Ho)). pose proof (ag_groups _ _ A o Ho). lia.
  - intros g Eg. destruct (at_groups_min _ _ A g Eg) as [o [Ho Eo]]. pose proof (me_min _ (M o Ho) g Eo). pose proof (ag_groups _ _ A o Ho). lia.
Qed.

Section Facts.
Variable W : nat.
Variable cfg : nat -> config.
Variable depth : nat -> nat.
Variable input : nat -> list sample.
Hypothesis ok : setting_ok W cfg.
Notation reachable := (System.reachable W cfg depth input).
Notation invariant := (System.invariant W cfg depth input).
Notation step := (System.step W cfg depth input).
Notation hist_of := (System.hist_of cfg).

Definition whole (s : sys) : hist := history (cfg 0) (results s).

Lemma invariant_of : forall s, reachable s -> invariant s.
Proof. destruct ok. intros. eapply reachable_invariant; eauto. Qed.

Lemma whole_when_current : forall s r, got s r = length (log s) -> hist_of s r = whole s.
Proof. intros s r G. unfold System.hist_of, whole. rewrite firstn_all2; [reflexivity|]. unfold results. rewrite map_length. lia. Qed.

Lemma whole_snoc : forall s ms x rk g p ru, whole (mkSys rk g p (log s ++ [(ms, x)]) ru) = h_step (cfg 0) (whole s) x.
Proof. intros. unfold whole, results. simpl. rewrite map_app. simpl. apply history_snoc. Qed.

Lemma pending_current : forall s r, invariant s -> r < W -> pending s r = true ->
  hist_of s r = whole s /\ got s r = length (log s) /\ is_waiting (rank_of s r) = true.
Proof.
  intros s r I H P. destruct (g_sync _ _ _ _ _ I r H) as [[_ [G Wa]]|[[P' _]|[P' _]]]; try congruence.
  split; [apply whole_when_current, G|auto].
Qed.

(** A rank is current, or its answer is the last result. *)
Lemma hist_cases : forall s r, invariant s -> r < W ->
  (got s r = length (log s) /\ hist_of s r = whole s) \/
  (pending s r = false /\ S (got s r) = length (log s) /\ is_waiting (rank_of s r) = true /\ exists ms x, nth_error (log s) (got s r) = Some (ms, x) /\
     nth_error ms r = Some (message (rank_of s r)) /\ whole s = h_step (cfg 0) (hist_of s r) x).
Proof.
  intros s r I H. destruct (g_sync _ _ _ _ _ I r H) as [[_ [G Wa]]|[[P [G [Wa [ms [x [L M]]]]]]|[_ [G Wa]]]].
  - left. split; [assumption|apply whole_when_current, G].
  - right. repeat split; auto. exists ms, x. repeat split; auto. unfold whole. rewrite <- (firstn_all (results s)).
    assert (El : length (results s) = S (got s r)) by (unfold results; rewrite map_length; lia). rewrite El.
    rewrite (firstn_snoc _ _ _ x); [apply history_snoc|]. apply (results_nth _ _ _ L).
  - left. split; [assumption|apply whole_when_current, G].
Qed.

Lemma got_current : forall s r x, invariant s -> r < W -> may cfg input s r (Got x) ->
  S (got s r) = length (log s) /\ is_waiting (rank_of s r) = true /\ whole s = h_step (cfg 0) (hist_of s r) x /\
  exists ms, nth_error (log s) (got s r) = Some (ms, x) /\ nth_error ms r = Some (message (rank_of s r)).
Proof.
  intros s r x I H [M1 M2]. destruct (sync_message _ _ _ _ s r x I H M1 M2) as [Wa [G [ms [L M]]]]. repeat split; auto; [|eauto].
  destruct (hist_cases s r I H) as [[G' _]|[_ [_ [_ [ms' [y [L' [_ E]]]]]]]]; [lia|]. rewrite L in L'. injection L' as <- <-. exact E.
Qed.

(** The offers of an exchange that is about to complete. *)
Lemma pending_offers : forall s a, invariant s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some (Agreed a) ->
  exists os, agreement_of a os /\ messages W s = map MOffer os /\
  (forall r, r < W -> exists o, In o os /\ at_phase (rank_of s r) = OFFER /\ posted (rank_of s r) = Some (MOffer o) /\ offer_ok (cfg r) r (rank_of s r) o) /\
  (forall o, In o os -> exists r, r < W /\ at_phase (rank_of s r) = OFFER /\ posted (rank_of s r) = Some (MOffer o) /\ offer_ok (cfg r) r (rank_of s r) o).
Proof.
  intros s a I P R. destruct (reduce_agreed _ _ R) as [os [E A]]. exists os. split; [exact A|]. split; [exact E|].
  assert (X : forall r o, r < W -> nth_error os r = Some o -> at_phase (rank_of s r) = OFFER /\ posted (rank_of s r) = Some (MOffer o) /\ offer_ok (cfg r) r (rank_of s r) o).
  { intros r o H Ho. pose proof (messages_nth W s r H) as Hm. rewrite E, (map_nth_error MOffer _ _ Ho) in Hm. injection Hm as Hm.
    destruct (pending_current s r I H (P r H)) as [_ [_ Wa]]. pose proof (g_core _ _ _ _ _ I r H) as K. unfold message in Hm. unfold is_waiting in Wa.
    destruct (at_phase (rank_of s r)) eqn:Ph; try discriminate.
    - destruct (k_offer _ _ _ _ _ _ K Ph) as [o' [Po Oo]]. rewrite Po in Hm. injection Hm as ->. auto.
    - rewrite (k_count _ _ _ _ _ _ K Ph) in Hm. discriminate.
    - destruct (k_report _ _ _ _ _ _ K Ph) as [x [Po _]]. rewrite Po in Hm. discriminate. }
  assert (L : length os = W) by (rewrite <- (map_length MOffer), <- E; apply messages_length).
  split.
  - intros r H. destruct (nth_error os r) as [o|] eqn:Ho; [|apply nth_error_None in Ho; lia]. exists o. split; [eapply nth_error_In; eauto|]. apply X; assumption.
  - intros o Ho. apply In_nth_error in Ho as [r Hr]. assert (H : r < W) by (rewrite <- L; apply nth_error_Some; congruence). exists r. split; [assumption|]. apply X; assumption.
Qed.

(** Not bad and no stop: everyone was ready. *)
Lemma ready_agreement : forall s a os, agreement_of a os -> is_bad a = false -> o_stop_rank a = None ->
  (forall o, In o os -> exists r, r < W /\ at_phase (rank_of s r) = OFFER /\ posted (rank_of s r) = Some (MOffer o) /\ offer_ok (cfg r) r (rank_of s r) o) ->
  o_ready a = true.
Proof.
  intros s a os A B Sr X. destruct (o_ready a) eqn:R; [reflexivity|]. destruct (at_ready _ _ A R) as [o [Ho Ro]]. destruct (X o Ho) as [r [_ [_ [_ O]]]].
  exfalso. destruct (of_flag _ _ _ _ O Ro) as [F|F].
  - apply (ag_failed _ _ A o Ho) in F. unfold is_bad in B. apply orb_false_iff in B as [B _]. apply orb_false_iff in B as [B _]. destruct (o_failed a); [discriminate|easy].
  - apply (ag_stop _ _ A o Ho) in F. contradiction.
Qed.

Definition quota_met (h : hist) : bool := is_quota_met (cfg 0) (h_samples h).

(** What a good agreement says, of which every rank takes part. *)
Lemma good_agreement_facts : forall s a, invariant s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some (Agreed a) ->
  is_bad a = false -> o_stop_rank a = None ->
  (forall r, r < W -> exists o, posted (rank_of s r) = Some (MOffer o) /\ at_phase (rank_of s r) = OFFER /\ o_ready o = true /\ wanted (rank_of s r) = 0 /\
     o_samples_max o <= o_samples_max a /\ o_samples_min a <= o_samples_max o /\
     o_samples_max o = if quota_met (whole s) then 0 else length (window (rank_of s r))) /\
  (o_samples_max a <> 0 -> sane a /\ quota_met (whole s) = false) /\
  (exists r, r < W /\ exists o, posted (rank_of s r) = Some (MOffer o) /\ o_samples_max o = o_samples_max a) /\
  (exists r, r < W /\ exists o, posted (rank_of s r) = Some (MOffer o) /\ o_samples_max o = o_samples_min a).
Proof.
  intros s a I P R B Sr. destruct (pending_offers s a I P R) as [os [A [Em [X1 X2]]]]. pose proof (ready_agreement s a os A B Sr X2) as Ra.
  assert (EO : entry_ok W cfg (messages W s, Agreed a)).
  { repeat split; simpl; [apply messages_length|exact R|]. intros r m Hm. assert (H : r < W) by (rewrite <- (messages_length W s); apply nth_error_Some; congruence).
    rewrite messages_nth in Hm by exact H. injection Hm as <-. eapply waiting_message; [eassumption|exact H|]. apply pending_current; auto. }
  assert (F : forall r o, r < W -> In o os -> at_phase (rank_of s r) = OFFER -> posted (rank_of s r) = Some (MOffer o) -> offer_ok (cfg r) r (rank_of s r) o ->
    o_ready o = true /\ wanted (rank_of s r) = 0 /\ o_samples_max o <= o_samples_max a /\ o_samples_min a <= o_samples_max o /\
    o_samples_max o = (if quota_met (whole s) then 0 else length (window (rank_of s r))) /\ (quota_met (whole s) = false -> measured o)).
  { intros r o H Ho Ph Po O. pose proof (ag_ready _ _ A o Ho Ra) as Ro. destruct (of_ready _ _ _ _ O Ro) as [R1 [R2 [R3 [R4 [R5 [R6 R7]]]]]].
    destruct (ag_samples _ _ A o Ho) as [S1 S2]. rewrite (of_samples _ _ _ _ O) in S1. pose proof (g_core _ _ _ _ _ I r H) as K.
    assert (Eq : is_quota_met (cfg r) (gsum (rank_of s r)) = quota_met (whole s)).
    { unfold quota_met. rewrite (k_gsum _ _ _ _ _ _ K). destruct (pending_current s r I H (P r H)) as [-> _].
      rewrite (good_agreement W cfg (some_rank _ _ ok) (prints_differ _ _ ok) _ _ r EO B H). reflexivity. }
    rewrite Eq in R4. repeat (split; [assumption|]). intros U. rewrite U in Eq. exact (ready_measured _ _ _ _ _ _ _ (configs_ok _ _ ok r H) K O Ro Eq). }
  split; [|split; [|split]].
  - intros r H. destruct (X1 r H) as [o [Ho [Ph [Po O]]]]. exists o. destruct (F r o H Ho Ph Po O) as [F1 [F2 [F3 [F4 [F5 _]]]]]. auto 10.
  - intros NZ. assert (U : quota_met (whole s) = false).
    { destruct (at_samples _ _ A) as [o [Ho Eo]]. destruct (X2 o Ho) as [r [H [Ph [Po O]]]]. destruct (F r o H Ho Ph Po O) as [_ [_ [_ [_ [F5 _]]]]].
      destruct (quota_met (whole s)); [congruence|reflexivity]. }
    split; [|exact U]. apply (sane_agreement a os A); [|exact NZ]. intros o Ho. destruct (X2 o Ho) as [r [H [Ph [Po O]]]]. apply (F r o H Ho Ph Po O), U.
  - destruct (at_samples _ _ A) as [o [Ho Eo]]. destruct (X2 o Ho) as [r [H [_ [Po _]]]]. eauto 6.
  - destruct (at_samples_min _ _ A) as [o [Ho Eo]]. destruct (X2 o Ho) as [r [H [_ [Po O]]]]. exists r. split; [exact H|]. exists o. split; [exact Po|]. rewrite <- Eo. symmetry. apply (of_samples _ _ _ _ O).
Qed.

End Facts.
