(** Facts about the whole system that the second invariant (Keeps.v) and the theorems rest on: frames of transitions, sums of counts,
    offers that are ready, and the exchange that is about to complete. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System.
Import ListNotations.

(** All assumptions about the ranks in one place. *)
Record setting_ok (W : nat) (cfg : nat -> config) : Prop := {
  some_rank : 1 <= W;
  configs_ok : forall r, r < W -> config_ok (cfg r);
  prints_differ : forall r q, r < W -> q < W -> c_print (cfg r) = c_print (cfg q) -> cfg r = cfg q }.

(** ** Frames: what a transition leaves unchanged *)

Definition groups_of (s : state) : list group := map s_group (steps_of s) ++ aligned s.

Record same (s t : state) : Prop := {
  sa_steps : steps_of t = steps_of s;
  sa_aligned : aligned t = aligned s;
  sa_plan : plan t = plan s;
  sa_ended : ended s = true -> ended t = true;
  sa_window : wanted s = 0 -> window t = window s /\ wanted t = 0;
  sa_failure : failure s <> None -> failure t = failure s;
  sa_collated : collated s = true -> collated t = true;
  sa_outcome : ended_as t = ended_as s;
  sa_round : round t = round s;
  sa_budget : budget t = budget s;
  sa_taken : exists x, taken t = taken s ++ x }.

Lemma transition_same : forall c r d s e t, (forall x, e <> Got x) -> transition c r d s e = Some t -> same s t.
Proof.
  intros c r d s e t NG E. assert (Same : exists x, taken s = taken s ++ x) by (exists []; symmetry; apply app_nil_r).
  destruct (own_event _ _ _ _ _ _ NG E) as [[G ->]|[-> _]]; [|constructor; auto].
  destruct e as [xs en full| |x| | |cause|]; try (constructor; simpl; auto; fail).
  - constructor; simpl; auto; [intros ->; reflexivity|intros Wa; destruct G; contradiction].
  - destruct G as [x [q [Q _]]]. constructor; simpl; eauto.
    change (steps_of (deliver d (set_taken (taken s ++ firstn 1 (queue s)) (set_queue (tl (queue s)) s))) = steps_of s). rewrite (proj1 (deliver_steps d _)).
    unfold steps_of. simpl. rewrite Q. simpl. rewrite <- app_assoc. reflexivity.
  - destruct G as [_ G]. constructor; simpl; auto. intros F. contradiction.
Qed.

Lemma drain_steps : forall d o l s, steps_of (drain d o l s) = steps_of s.
Proof. intros. apply (deliver_steps d (set_phase DRAIN (set_outcome (Some o) (set_limit (Some match limit s with Some m => Nat.min l m | None => l end) s)))). Qed.

(** The cases of an agreement: a report, an end as stopped or complete, or counts. *)
Ltac each_agreement E B Sr Ra Tg Ea :=
  unfold agree in E; destruct (is_bad _) eqn:B;
  [injection E as <-
  |destruct (o_round_min _ =? _) eqn:Rd; [apply Nat.eqb_eq in Rd|discriminate]; cbv iota beta delta [negb] in E; destruct (o_stop_rank _) as [q|] eqn:Sr;
   [injection E as <-
   |destruct (o_ready _) eqn:Ra; [|discriminate]; simpl negb in E; cbv iota zeta in E; destruct (target _ _) as [|n] eqn:Tg;
    [injection E as <-|destruct (align_at _ _ _ _ _ _) as [al ca] eqn:Ea; injection E as <-]]].

Lemma agree_round : forall c rank d a s t, agree c rank d a s = Some t -> round t = round s.
Proof. intros c rank d a s t E. each_agreement E B Sr Ra Tg Ea; reflexivity. Qed.

Lemma agree_budget : forall c rank d a s t, agree c rank d a s = Some t -> at_phase t = COUNT -> budget t = o_budget a.
Proof. intros c rank d a s t E P. each_agreement E B Sr Ra Tg Ea; first [reflexivity|discriminate|drains]. Qed.

Lemma count_eq : forall c rank cs s t, count c rank cs s = Some t ->
  let n := cut c (gsum s) cs in let returned := concat (skipn n (aligned s)) in
  length cs = length (aligned s) /\
  t = post c rank (set_phase FILL (set_round (S (round s)) (set_window (if is_nil returned then window s else by_position (window s ++ returned)) (set_aligned []
      (set_plan (make_steps (planned s) (round s) (firstn n (aligned s)) cs) (set_collated false
      (set_planned (planned s + n) (set_gsum (gsum s + total_samples (firstn n cs)) s)))))))).
Proof. intros c rank cs s t E. unfold count in E. destruct (length cs =? _) eqn:L; [|discriminate]. apply Nat.eqb_eq in L. injection E as <-. auto. Qed.

Lemma count_budget : forall c rank cs s t, count c rank cs s = Some t -> budget t = budget s /\ round t = S (round s).
Proof. intros c rank cs s t E. destruct (count_eq _ _ _ _ _ E) as [_ ->]. auto. Qed.

Lemma answer_keeps : forall c r d s x t, transition c r d s (Got x) = Some t ->
  failure t = failure s /\ stopped t = stopped s /\ urged t = urged s /\ taken t = taken s /\ read t = read s /\ ended t = ended s.
Proof.
  intros c r d s x t E. simpl in E. destruct x as [a|cs|rs]; destruct (at_phase s); try discriminate.
  - each_agreement E B Sr Ra Tg Ea; repeat split.
  - destruct (count_eq _ _ _ _ _ E) as [_ ->]. repeat split.
  - destruct (failure_of rs); [|discriminate]. injection E as <-. repeat split.
Qed.

(** The four possible effects of an agreement. *)
Inductive agreed (c : config) (rank : nat) (a : offer) (s t : state) : Prop :=
| agreed_bad : is_bad a = true -> at_phase t = REPORT -> posted t = Some (MReport (mkReport rank (failure s) (round s) (c_print c))) ->
    plan t = plan s -> agreed c rank a s t
| agreed_stop : forall q, is_bad a = false -> o_stop_rank a = Some q -> at_phase t = DRAIN \/ at_phase t = DONE -> plan t = plan s -> agreed c rank a s t
| agreed_complete : is_bad a = false -> o_stop_rank a = None -> o_ready a = true -> target c a = Closes -> at_phase t = DRAIN \/ at_phase t = DONE -> plan t = [] ->
    agreed c rank a s t
| agreed_count : forall n, is_bad a = false -> o_stop_rank a = None -> o_ready a = true -> target c a = Makes n -> at_phase t = COUNT -> plan t = [] ->
    aligned t = fst (form_steps c s n) -> window t = snd (form_steps c s n) -> o_round_min a = round s -> agreed c rank a s t.

Lemma agree_cases : forall c rank d a s t, agree c rank d a s = Some t ->
  agreed c rank a s t /\ steps_of t = steps_of s /\ failure t = failure s /\ taken t = taken s /\
  (at_phase t <> COUNT -> aligned t = aligned s /\ window t = window s /\ wanted t = wanted s).
Proof.
  intros c rank d a s t E. assert (Rl : steps_of (set_released (released s ++ plan s) (set_plan [] (set_groups [] s))) = steps_of s) by (unfold steps_of; simpl; rewrite app_nil_r; reflexivity).
  each_agreement E B Sr Ra Tg Ea.
  - split; [apply agreed_bad; auto|repeat split].
  - split; [eapply agreed_stop; eauto; apply drain_phase|]. rewrite drain_steps. repeat split.
  - split; [apply agreed_complete; auto; apply drain_phase|]. rewrite drain_steps. split; [exact Rl|]. repeat split.
  - split; [apply agreed_count with (n := n); auto; rewrite Ea; reflexivity|]. rewrite (proj1 (deliver_steps d _)). split; [exact Rl|]. repeat split; simpl in *; congruence.
Qed.

Lemma make_steps_in : forall gs cs n rd y, In y (make_steps n rd gs cs) -> s_round y = rd /\ In (s_group y) gs.
Proof.
  induction gs as [|g gs IH]; intros [|c cs] n rd y H; simpl in *; try contradiction. destruct H as [<-|H]; [auto|].
  destruct (IH _ _ _ _ H). auto.
Qed.

Lemma count_cases : forall c rank cs s t, count c rank cs s = Some t ->
  length cs = length (aligned s) /\ aligned t = [] /\ failure t = failure s /\ taken t = taken s /\ (at_phase t = FILL \/ at_phase t = OFFER) /\
  (plan s = [] -> exists new, steps_of t = steps_of s ++ new /\ map s_group new = firstn (cut c (gsum s) cs) (aligned s) /\ plan t = new /\
    Forall (fun x => s_round x = round s) new).
Proof.
  intros c rank cs s t E. destruct (count_eq _ _ _ _ _ E) as [L ->]. split; [exact L|]. split; [reflexivity|]. split; [reflexivity|]. split; [reflexivity|].
  split; [match goal with |- context[post c rank ?u] => destruct (post_phase c rank u) as [-> |[_ ->]]; auto end|].
  intros Pl. exists (make_steps (planned s) (round s) (firstn (cut c (gsum s) cs) (aligned s)) cs).
  split; [unfold steps_of; simpl; rewrite Pl, app_nil_r, !app_assoc; reflexivity|].
  split; [|split; [reflexivity|apply Forall_forall; intros x Ix; apply (make_steps_in _ _ _ _ _ Ix)]].
  apply make_steps_groups. rewrite firstn_length. pose proof (cut_le c (gsum s) cs). lia.
Qed.

(** ** Sums *)

Definition sum_counts (l : list counts) : counts := fold_left add_counts l zero_counts.

Lemma nth_add_costs : forall r a b, nth r (add_costs a b) 0 = nth r a 0 + nth r b 0.
Proof. intros r a. revert r. induction a as [|x a IH]; intros [|r] [|y b]; simpl; try lia. apply IH. Qed.
Lemma nth_costs_of_group : forall r g, nth r (n_costs (count_group g)) 0 = used r g.
Proof. intros r. induction g as [|x g IH]; simpl; [destruct r; reflexivity|]. rewrite nth_add_costs. simpl in IH. rewrite IH. reflexivity. Qed.

(** A field that is added when counts are. *)
Lemma fold_add : forall (f : counts -> nat), (forall a b, f (add_counts a b) = f a + f b) -> forall l a, f (fold_left add_counts l a) = f a + sum_over f l.
Proof. intros f H. induction l as [|x l IH]; simpl; intros a; [lia|]. rewrite IH, H. lia. Qed.

Lemma sum_over_positive : forall (A : Type) (f : A -> nat) l, 0 < sum_over f l <-> exists q, In q l /\ 0 < f q.
Proof.
  intros A f. induction l as [|x l IH]; simpl; [split; [lia|intros [q [[] _]]]|]. split.
  - intros P. destruct (f x) eqn:F; [|exists x; split; [auto|lia]]. apply IH in P as [q [Hq P]]. eauto.
  - intros [q [[<-|Hq] P]]; [lia|]. assert (0 < sum_over f l) by (apply IH; eauto). lia.
Qed.

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

(** ** Offers that are ready *)

(** If there are groups, the rank offers to emit all of them or all but one, and at least one. *)
Lemma groups_to_emit_bounds : forall c b gs, 1 <= length gs -> 1 <= groups_to_emit c b gs <= length gs /\ length gs <= S (groups_to_emit c b gs).
Proof. intros c b gs L. unfold groups_to_emit. destruct (Nat.ltb_spec 1 (length gs)), (c_keeps c b gs); simpl; lia. Qed.

(** What the offer of a ready rank states about its groups. *)
Record measured (o : offer) : Prop := {
  me_groups : o_groups_max o <= o_samples_max o;
  me_some : 1 <= o_samples_max o -> 1 <= o_groups_max o;
  me_due : o_due_max o <= o_groups_max o;
  me_min : forall g, o_groups_min o = Some g -> 1 <= g <= o_groups_max o }.

(** A rank that reads on has a sample in its window, hence a group, if the round forms steps. *)
Lemma ready_groups : forall c c0 r inp h u, config_ok c -> core c c0 r inp h u -> at_phase u = OFFER -> wanted u = 0 -> groups u = form_groups c u ->
  has_steps c (round u) = true -> ended u = true \/ 1 <= length (window u) /\ 1 <= length (groups u).
Proof.
  intros c c0 r inp h u OK K Ph Wa G Hs. destruct (more_unless_counting _ _ _ _ _ _ K) as [M|[M|M]]; [congruence|auto| |].
  - right. rewrite Wa in M. rewrite G. unfold groups_at. rewrite Hs. pose proof (Permutation_length (ok_group_perm _ OK (budget u) (window u))).
    destruct (c_group c (budget u) (window u)); simpl in *; lia.
  - unfold coming, in_count in M. rewrite Ph, Nat.add_0_r in M. congruence.
Qed.

Lemma held_is_window : forall c c0 r inp h u, config_ok c -> core c c0 r inp h u -> at_phase u = OFFER -> wanted u = 0 -> groups u = form_groups c u ->
  has_steps c (round u) = true -> held_samples c u = length (window u).
Proof.
  intros c c0 r inp h u OK K Ph Wa G Hs. unfold held_of. destruct (ready_groups _ _ _ _ _ _ OK K Ph Wa G Hs) as [-> |[L _]]; [rewrite andb_false_r; reflexivity|destruct (_ && _); lia].
Qed.

Lemma ready_groups_to_emit : forall c c0 r inp h u o g, config_ok c -> core c c0 r inp h u -> at_phase u = OFFER -> offer_ok c r u o -> o_ready o = true -> o_groups_min o = Some g ->
  1 <= g <= o_groups_max o /\ o_groups_max o <= S g.
Proof.
  intros c c0 r inp h u o g OK K Ph O Ro Eg. destruct (of_ready _ _ _ _ O Ro) as [_ [R2 [R3 [_ [R5 [R6 _]]]]]]. rewrite R6 in Eg.
  destruct (ended u) eqn:En; [discriminate|]. destruct (c_updates c) eqn:Up; [discriminate|]. injection Eg as <-. rewrite R5. apply groups_to_emit_bounds.
  destruct (ready_groups _ _ _ _ _ _ OK K Ph R2 R3) as [X|[_ X]]; [apply (without_updates c Up)|congruence|exact X].
Qed.

Lemma ready_measured : forall c c0 r inp h u o, config_ok c -> core c c0 r inp h u -> at_phase u = OFFER -> offer_ok c r u o -> o_ready o = true ->
  is_quota_met c (gsum u) = false -> has_steps c (round u) = true -> measured o.
Proof.
  intros c c0 r inp h u o OK K Ph O Ro U Hs. destruct (of_ready _ _ _ _ O Ro) as [R1 [R2 [R3 [R4 [R5 [R6 R7]]]]]]. rewrite U in R4.
  pose proof (held_is_window _ _ _ _ _ _ OK K Ph R2 R3 Hs) as Hw. rewrite Hw in R4.
  assert (R3' : groups u = c_group c (budget u) (window u)) by (rewrite R3; unfold groups_at; rewrite Hs; reflexivity).
  pose proof (Permutation_length (ok_group_perm _ OK (budget u) (window u))) as Lp. constructor.
  - enough (length (groups u) <= length (window u)) by (rewrite R5, R4; exact H). rewrite R3', <- Lp. apply concat_of_nonempty, (ok_group_nonempty _ OK).
  - rewrite R4, R5, R3'. intros L. destruct (c_group c (budget u) (window u)); simpl in *; lia.
  - rewrite R7, R5. unfold count_due. rewrite <- (Permutation_length (filter_split _ (is_due (due_before c u)) (groups u))), app_length. lia.
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
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Notation reachable := (System.reachable W cfg depth input).
Notation standing := (System.standing W cfg depth input).

Lemma invariant_of : forall s, reachable s -> System.invariant W cfg depth input (h0 := fresh) s.
Proof. destruct ok. intros. eapply reachable_invariant; eauto. Qed.

Definition whole_from (h0 : origin) (s : sys) : hist := history_from h0 (cfg 0) (results s).

Context {h0 : origin}.
Notation invariant := (System.invariant W cfg depth input (h0 := h0)).
Notation hist_of := (System.hist_from cfg h0).
Notation whole := (whole_from h0).

Lemma whole_when_current : forall s r, got s r = length (log s) -> hist_of s r = whole s.
Proof. intros s r G. unfold System.hist_from, whole_from. rewrite (seen_current s r G). reflexivity. Qed.

Lemma whole_snoc : forall s ms x rk g p ru, whole (mkSys rk g p (log s ++ [(ms, x)]) ru) = h_step (cfg 0) (whole s) x.
Proof. intros. unfold whole_from, results. simpl. rewrite map_app. simpl. apply history_snoc. Qed.

Lemma pending_current : forall s r, invariant s -> r < W -> pending s r = true ->
  hist_of s r = whole s /\ got s r = length (log s) /\ is_waiting (rank_of s r) = true.
Proof. intros s r I H P. destruct (pending_sync _ _ _ _ s r I H P) as [E X]. unfold System.hist_from. rewrite E. exact (conj eq_refl X). Qed.

(** The kind of an exchange that completes shows where all ranks are. *)
Lemma exchange_kind : forall s x, invariant s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some x ->
  h_kind (whole s) = match x with Agreed _ => NOffer | Counted cs => NCount (length cs) | Reported _ => NReport end.
Proof.
  intros s x I P R. pose proof (some_rank _ _ ok) as H. destruct (pending_current s 0 I H (P 0 H)) as [E [_ Wa]].
  pose proof (g_core _ _ _ _ _ I 0 H) as K. rewrite E in K. pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk.
  pose proof (waiting_says _ _ _ _ _ _ K Wa) as Sa. pose proof (nth_error_In _ _ (messages_nth W s 0 H)) as Im. pose proof (reduce_says _ _ _ R Im) as Say.
  destruct (message (rank_of s 0)) as [o|cs'|y], x as [a|cs|rs]; try contradiction; destruct Sa as [Ph Sa]; rewrite Ph in Kk; [exact Kk| |exact Kk].
  destruct (reduce_is _ _ R) as [l [El [F _]]]. rewrite El in Im. apply in_map_iff in Im as [c [Ec Ic]].
  injection Ec as ->. rewrite Forall_forall in F.
  destruct Kk as [Kk _]. rewrite <- (F _ Ic), Kk, Sa, map_length. reflexivity.
Qed.

(** A property that holds of each rank at the start, and that every event keeps, always holds of each rank. *)
Lemma each_rank_always : forall P : nat -> list result -> state -> Prop, (forall r, r < W -> P r [] (initial (cfg r) r)) ->
  (forall s r e u, reachable s -> r < W -> may cfg input s r e -> (forall x, e <> Got x) -> transition (cfg r) r (depth r) (rank_of s r) e = Some u ->
    P r (seen s r) (rank_of s r) -> P r (seen s r) u) ->
  (forall s r x u, reachable s -> r < W -> may cfg input s r (Got x) -> transition (cfg r) r (depth r) (rank_of s r) (Got x) = Some u ->
    P r (seen s r) (rank_of s r) -> P r (seen s r ++ [x]) u) ->
  (forall s r n la, reachable s -> r < W -> may_draw cfg input s r n la -> P r (seen s r) (rank_of s r) -> P r (seen s r) (draws n la (rank_of s r))) ->
  forall s, reachable s -> forall r, r < W -> P r (seen s r) (rank_of s r).
Proof.
  intros P Begin Own Answer Draw. induction 1 as [|s l t R IH St]; [exact Begin|]. apply (each_rank_keeps W cfg depth input P s l t (invariant_of s R) St);
    [intros r e u _; apply (Own s r e u R)|intros r x u; apply (Answer s r x u R)|intros r n la _; apply (Draw s r n la R)|exact IH].
Qed.

(** A rank either has received all results, or waits for the last one. *)
Lemma hist_cases : forall s r, invariant s -> r < W ->
  (got s r = length (log s) /\ hist_of s r = whole s) \/
  (pending s r = false /\ S (got s r) = length (log s) /\ is_waiting (rank_of s r) = true /\ exists ms x, nth_error (log s) (got s r) = Some (ms, x) /\
     nth_error ms r = Some (message (rank_of s r)) /\ whole s = h_step (cfg 0) (hist_of s r) x).
Proof.
  intros s r I H. destruct (g_sync _ _ _ _ _ I r H) as [[_ [G Wa]]|[[P [G [Wa [ms [x [L M]]]]]]|[_ [G Wa]]]].
  - left. split; [assumption|apply whole_when_current, G].
  - right. repeat split; auto. exists ms, x. repeat split; auto. unfold whole_from. rewrite <- (firstn_all (results s)).
    assert (El : length (results s) = S (got s r)) by (unfold results; rewrite map_length; lia). rewrite El.
    rewrite (firstn_snoc _ _ _ x); [apply history_snoc|]. apply (results_nth _ _ _ L).
  - left. split; [assumption|apply whole_when_current, G].
Qed.

Lemma got_current : forall s r x, invariant s -> r < W -> may cfg input s r (Got x) ->
  S (got s r) = length (log s) /\ is_waiting (rank_of s r) = true /\ whole s = h_step (cfg 0) (hist_of s r) x /\
  exists ms, nth_error (log s) (got s r) = Some (ms, x) /\ nth_error ms r = Some (message (rank_of s r)).
Proof.
  intros s r x I H [M1 [M2 _]]. destruct (sync_answer s r x (g_sync _ _ _ _ _ I r H) M1 M2) as [Wa [G [ms [L M]]]]. repeat split; auto; [|eauto].
  destruct (hist_cases s r I H) as [[G' _]|[_ [_ [_ [ms' [y [L' [_ E]]]]]]]]; [lia|]. rewrite L in L'. injection L' as <- <-. exact E.
Qed.

(** An agreement that a rank receives includes the rank's own offer. *)
Lemma answered_offer : forall s r a, invariant s -> r < W -> may cfg input s r (Got (Agreed a)) -> at_phase (rank_of s r) = OFFER ->
  exists o os, agreement_of a os /\ In o os /\ posted (rank_of s r) = Some (MOffer o) /\ offer_ok (cfg r) r (rank_of s r) o.
Proof.
  intros s r a I H M Ph. destruct (got_current s r _ I H M) as [_ [_ [_ [ms [El Em]]]]]. destruct (k_offer _ _ _ _ _ _ (g_core _ _ _ _ _ I r H) Ph) as [o [Po O]].
  destruct (log_entry _ _ _ _ s _ _ I El) as [_ [ER _]]. unfold message in Em. rewrite Po in Em.
  destruct (reduce_says _ _ _ ER (nth_error_In _ _ Em)) as [os [_ [A Io]]]. exists o, os. auto.
Qed.

(** The offers of an exchange that is about to complete. *)
Lemma pending_offers : forall s a, standing s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some (Agreed a) ->
  exists os, agreement_of a os /\ messages W s = map MOffer os /\
  (forall r, r < W -> exists o, In o os /\ at_phase (rank_of s r) = OFFER /\ posted (rank_of s r) = Some (MOffer o) /\ offer_ok (cfg r) r (rank_of s r) o) /\
  (forall o, In o os -> exists r, r < W /\ at_phase (rank_of s r) = OFFER /\ posted (rank_of s r) = Some (MOffer o) /\ offer_ok (cfg r) r (rank_of s r) o).
Proof.
  intros s a I P R. destruct (reduce_is _ _ R) as [os [E [A _]]]. exists os. split; [exact A|]. split; [exact E|].
  destruct (each_has_said W s _ MOffer os E) as [L Said].
  assert (X : forall r o, r < W -> nth_error os r = Some o -> at_phase (rank_of s r) = OFFER /\ posted (rank_of s r) = Some (MOffer o) /\ offer_ok (cfg r) r (rank_of s r) o).
  { intros r o H Ho. destruct (Said r H) as [o' [Ho' Hm]]. rewrite Ho in Ho'. injection Ho' as <-. destruct (g_some _ _ _ _ _ I r H) as [h [K _]].
    pose proof (waiting_says _ _ _ _ _ _ K (proj2 (proj2 (pending_sync _ _ _ _ s r I H (P r H))))) as Sa. rewrite Hm in Sa. exact Sa. }
  split.
  - intros r H. destruct (Said r H) as [o [Ho _]]. exists o. split; [eapply nth_error_In; eauto|]. apply X; assumption.
  - intros o Ho. apply In_nth_error in Ho as [r Hr]. assert (H : r < W) by (rewrite <- L; apply nth_error_Some; congruence). exists r. split; [assumption|]. apply X; assumption.
Qed.

(** An agreement that is neither bad nor a stop: every rank was ready. *)
Lemma ready_agreement : forall s a os, agreement_of a os -> is_bad a = false -> o_stop_rank a = None ->
  (forall o, In o os -> exists r, r < W /\ at_phase (rank_of s r) = OFFER /\ posted (rank_of s r) = Some (MOffer o) /\ offer_ok (cfg r) r (rank_of s r) o) ->
  o_ready a = true.
Proof.
  intros s a os A B Sr X. apply (all_were_ready a os A B Sr). intros o Ho Ro. destruct (X o Ho) as [r [_ [_ [_ O]]]]. exact (of_flag _ _ _ _ O Ro).
Qed.

Definition quota_met (h : hist) : bool := is_quota_met (cfg 0) (h_samples h).

(** What a good agreement implies for the offer of every rank. *)
Lemma good_agreement_facts : forall s a, invariant s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some (Agreed a) ->
  is_bad a = false -> o_stop_rank a = None ->
  (forall r, r < W -> exists o, posted (rank_of s r) = Some (MOffer o) /\ at_phase (rank_of s r) = OFFER /\ o_ready o = true /\ wanted (rank_of s r) = 0 /\
     o_samples_max o <= o_samples_max a /\ o_samples_min a <= o_samples_max o /\
     o_samples_max o = if quota_met (whole s) then 0 else held_samples (cfg r) (rank_of s r)) /\
  (o_samples_max a <> 0 -> quota_met (whole s) = false /\ (has_steps (cfg 0) (o_round_min a) = true -> sane a)) /\
  (exists r, r < W /\ exists o, posted (rank_of s r) = Some (MOffer o) /\ o_samples_max o = o_samples_max a) /\
  (exists r, r < W /\ exists o, posted (rank_of s r) = Some (MOffer o) /\ o_samples_max o = o_samples_min a).
Proof.
  intros s a I P R B Sr. destruct (pending_offers s a I P R) as [os [A [Em [X1 X2]]]]. pose proof (ready_agreement s a os A B Sr X2) as Ra.
  pose proof (exchange_entry _ _ _ _ s _ I P R) as EO.
  assert (F : forall r o, r < W -> In o os -> at_phase (rank_of s r) = OFFER -> posted (rank_of s r) = Some (MOffer o) -> offer_ok (cfg r) r (rank_of s r) o ->
    o_ready o = true /\ wanted (rank_of s r) = 0 /\ o_samples_max o <= o_samples_max a /\ o_samples_min a <= o_samples_max o /\
    o_samples_max o = (if quota_met (whole s) then 0 else held_samples (cfg r) (rank_of s r)) /\
    (quota_met (whole s) = false -> has_steps (cfg 0) (o_round_min a) = true -> measured o)).
  { intros r o H Ho Ph Po O. pose proof (ag_ready _ _ A o Ho Ra) as Ro. destruct (of_ready _ _ _ _ O Ro) as [R1 [R2 [R3 [R4 [R5 [R6 R7]]]]]].
    destruct (ag_samples _ _ A o Ho) as [S1 S2]. rewrite (of_samples _ _ _ _ O) in S1. pose proof (g_core _ _ _ _ _ I r H) as K.
    pose proof (good_agreement W cfg (some_rank _ _ ok) (prints_differ _ _ ok) _ _ r EO B H) as Same.
    assert (Eq : is_quota_met (cfg r) (gsum (rank_of s r)) = quota_met (whole s)).
    { unfold quota_met. rewrite (k_gsum _ _ _ _ _ _ K). destruct (pending_current s r I H (P r H)) as [-> _]. rewrite Same. reflexivity. }
    assert (Rd : o_round_min a = round (rank_of s r)) by (destruct (of_round _ _ _ _ O), (ag_round _ _ A o Ho), (not_bad a B) as [_ [E _]]; lia).
    rewrite Eq in R4. repeat (split; [assumption|]). intros U Hs. rewrite U in Eq. rewrite <- Same, Rd in Hs. revert Hs. exact (ready_measured _ _ _ _ _ _ _ (configs_ok _ _ ok r H) K Ph O Ro Eq). }
  split; [|split; [|split]].
  - intros r H. destruct (X1 r H) as [o [Ho [Ph [Po O]]]]. exists o. destruct (F r o H Ho Ph Po O) as [F1 [F2 [F3 [F4 [F5 _]]]]]. auto 10.
  - intros NZ. assert (U : quota_met (whole s) = false).
    { destruct (at_samples _ _ A) as [o [Ho Eo]]. destruct (X2 o Ho) as [r [H [Ph [Po O]]]]. destruct (F r o H Ho Ph Po O) as [_ [_ [_ [_ [F5 _]]]]].
      destruct (quota_met (whole s)); [congruence|reflexivity]. }
    split; [exact U|]. intros Hs. apply (sane_agreement a os A); [|exact NZ]. intros o Ho. destruct (X2 o Ho) as [r [H [Ph [Po O]]]]. apply (F r o H Ho Ph Po O); [exact U|exact Hs].
  - destruct (at_samples _ _ A) as [o [Ho Eo]]. destruct (X2 o Ho) as [r [H [_ [Po _]]]]. eauto 6.
  - destruct (at_samples_min _ _ A) as [o [Ho Eo]]. destruct (X2 o Ho) as [r [H [_ [Po O]]]]. exists r. split; [exact H|]. exists o. split; [exact Po|]. rewrite <- Eo. symmetry. apply (of_samples _ _ _ _ O).
Qed.

(** Such an agreement is of the round that all ranks are in. *)
Lemma good_agreement_round : forall s a, standing s -> (forall r, r < W -> pending s r = true) -> reduce (messages W s) = Some (Agreed a) ->
  is_bad a = false -> forall r, r < W -> o_round_min a = round (rank_of s r).
Proof.
  intros s a I P R B r H. destruct (pending_offers s a I P R) as [os [A [_ [X _]]]]. destruct (X r H) as [o [Ho [_ [_ O]]]].
  destruct (of_round _ _ _ _ O) as [O1 O2]. destruct (ag_round _ _ A o Ho). destruct (not_bad a B) as [_ [E _]]. lia.
Qed.

End Facts.

Notation whole cfg := (whole_from cfg fresh).
