(** FREE with shared shards: while no consumer leaves, a job can always go on by itself, or it is over. What follows a job ([Job.v])
    may read where the job waits for counts; once it has been told that there is nothing more, it can do what the job can. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Types Alignment Machine Local Rank System Facts Keeps Protocol Coupled Termination Shards Drawing Job.
Import ListNotations.

(** ** What a rank accepts *)

(** What befalls a rank from outside. *)
Definition befallen (u : state) : option nat * bool * bool := (failure u, stopped u, urged u).

Lemma nothing_befalls : forall c r d u e t, unurged (LRank r e) -> transition c r d u e = Some t -> befallen t = befallen u.
Proof.
  intros c r d u e t U E. destruct (answer_or_own e) as [[x ->]|NG].
  - destruct (answer_keeps _ _ _ _ _ _ E) as [F [S [Ur _]]]. unfold befallen. congruence.
  - destruct (own_event _ _ _ _ _ _ NG E) as [[_ ->]|[-> _]]; [destruct e; try contradiction|]; reflexivity.
Qed.

(** Whether it accepts an event that brings no samples hangs neither on what it wants nor on who knows of the end. *)
Lemma accepted_in_any_dress : forall c big r d w e m u x t, match x with SamplesRead _ _ _ | Got (Agreed _) => False | _ => True end ->
  transition (wide big c) r d (dress w e m u) x = Some t -> exists t', transition c r d u x = Some t'.
Proof.
  intros c big r d w e m u x t X E. destruct (answer_or_own x) as [[y ->]|NG].
  - simpl in *. destruct y as [a|cs|rs]; try contradiction; change (at_phase (dress w e m u)) with (at_phase u) in E; destruct (at_phase u); try discriminate.
    + destruct (count_eq _ _ _ _ _ E) as [L _]. change (aligned (dress w e m u)) with (aligned u) in L. unfold count. rewrite L, Nat.eqb_refl. simpl. eauto.
    + destruct (failure_of rs); [eauto|discriminate].
  - destruct (own_event _ _ _ _ _ _ NG E) as [[G _]|[_ D]].
    + exists (post c r (moved d u x)). destruct x; try contradiction; match goal with |- transition ?c ?r ?d ?v ?x = _ => exact (granted_event c r d v x G) end.
    + exists u. exact (deaf_event c r d u x D).
Qed.

Lemma agreed_in_any_dress : forall c big r d w e m u a b t, alike_offer a b ->
  transition (wide big c) r d (dress w e m u) (Got (Agreed b)) = Some t -> exists t', transition c r d u (Got (Agreed a)) = Some t'.
Proof.
  intros c big r d w e m u a b t Al E. simpl in *. destruct (at_phase u); try discriminate. unfold agree in *.
  assert (Same : is_bad b = is_bad a /\ o_round_min b = o_round_min a /\ o_stop_rank b = o_stop_rank a /\ (b = a \/ o_failed a <> None \/ o_stop_rank a <> None)).
  { destruct Al as [->|[L [g ->]]]; [auto|]. unfold is_last_offer in L. repeat split; auto. }
  destruct Same as [S1 [S2 [S3 S4]]]. rewrite S1, S2, S3 in E. simpl in E. destruct (is_bad a) eqn:Bad; [eauto|]. destruct (negb (o_round_min a =? round u)); [discriminate|].
  destruct (o_stop_rank a) eqn:St; [eauto|]. destruct S4 as [->|[S4|S4]]; [|exfalso; unfold is_bad in Bad; destruct (o_failed a); [discriminate|contradiction]|contradiction].
  destruct (negb (o_ready a)); [discriminate|]. clear. destruct (target c a) as [|n]; [eauto|].
  destruct (c_align c (round u) (groups u) (S n) (due_before c u)). eauto.
Qed.

(** ** What has been told *)

Lemma alike_offer_back : forall o p, alike_offer o p -> alike_offer p o.
Proof.
  intros o p [->|[L [g ->]]]; [left; reflexivity|]. right. split; [exact L|]. exists (o_groups_min o). destruct o. reflexivity.
Qed.

Lemma alike_msg_back : forall m n, alike_msg m n -> alike_msg n m.
Proof. intros m n [->|[o [p [-> [-> A]]]]]; [left; reflexivity|right; exists p, o; auto using alike_offer_back]. Qed.

Lemma alike_back : forall ms ns, Forall2 alike_msg ms ns -> Forall2 alike_msg ns ms.
Proof. induction 1; constructor; auto using alike_msg_back. Qed.

Lemma nth_alike : forall l k, Forall2 alike_result l k -> forall n y, nth_error k n = Some y -> exists x, nth_error l n = Some x /\ alike_result x y.
Proof. induction 1 as [|x y l k A F IH]; intros [|n] z E; simpl in *; try discriminate; [injection E as <-; eauto|apply IH, E]. Qed.

Section Lively.
Variables (W total : nat).
Variable cfg : nat -> config.
Variable depth : nat -> nat.
Variable order : nat -> sample.
Variable deal : (nat -> nat) -> nat -> nat -> list nat.
Variable wish : nat -> nat -> nat -> list sample -> list sample -> nat.
Hypothesis ok : setting_ok W cfg.
Hypothesis deep : forall r, r < W -> 1 <= depth r.
Hypothesis deal_next : forall ws d, exists n, n <= total - d /\ Permutation (dealt_out W deal ws d) (seq d n).
Hypothesis deal_feeds : forall ws d r, r < W -> 1 <= ws r -> 1 <= length (deal ws d r) \/ total <= d + length (dealt_out W deal ws d).
Hypothesis wish_some : forall r k d w, r < W -> 1 <= wish r k d w [].

Notation shared_reachable := (shared_reachable W total cfg depth order deal wish).
Notation shared_step := (shared_step W total cfg depth order deal wish).
Notation own := (own W cfg).
Notation reachable input := (System.reachable W (own input) depth input).

Lemma all_wants_are_told : forall s, shared_reachable s ->
  forall k cs, nth_error (results (base s)) k = Some (Counted cs) -> exists ws, nth_error (told s) k = Some (Some ws).
Proof.
  assert (X : forall s, shared_reachable s -> Forall2 (fun x w => is_counted x = true -> exists ws, w = Some ws) (results (base s)) (told s)).
  { induction 1 as [|s s' R IH St]; [constructor|]. destruct St; try exact IH. unfold results in *. cbn [base log told]. rewrite map_app.
    apply Forall2_app; [exact IH|]. constructor; [|constructor]. simpl. intros ->. eauto. }
  intros s R k cs. specialize (X s R). revert k. induction X as [|x w l m H F IH]; intros [|k] E; simpl in *; try discriminate; [|apply IH, E].
  injection E as ->. destruct (H eq_refl) as [ws ->]. eauto.
Qed.

(** ** What follows the job and reads no more *)

(** The first [k] ranks of it read nothing any more; the others may where the job waits for counts, or is done. *)
Definition has_read_up_to (k : nat) (s : shared_sys) (r w : nat) (e : bool) : Prop :=
  w <> 0 -> k <= r /\ (at_phase (rank_of (base s) r) = COUNT \/ at_phase (rank_of (base s) r) = DONE).
Notation beside k s := (Job.beside W (has_read_up_to k s) s).

Definition has_read (s : shared_sys) : Prop := forall r, r < W -> begun s r = true /\ wanted (rank_of (base s) r) = 0.

Lemma none_is_open : forall s, shared_reachable s -> has_read s ->
  let input := fun r => content order (places s r) in
  forall k, k <= W -> exists t, reachable input t /\ beside k s t.
Proof.
  intros s R Rd input. destruct (shared_runs W total cfg depth order deal wish ok deal_next deal_feeds wish_some s R) as [B H].
  induction k as [|k IH]; intros L.
  - destruct (H input (content_of_places W order s)) as [t [Rt F]]. exists t. split; [exact Rt|].
    destruct F as [F1 F2 F3 F4 F5]. constructor; auto. intros r Hr. destruct (F5 r Hr) as [w [e [m [N1 [N2 T]]]]]. exists w, e, m. split; [exact N1|]. split; [exact N2|]. intros Nz. split; [lia|].
    destruct (Rd r Hr) as [Bg Wz]. unfold at_rank in T. rewrite Bg in T. unfold tied in T. rewrite Wz in T.
    destruct (at_phase (rank_of (base s) r)); auto; simpl in T; destruct T; contradiction.
  - destruct (IH ltac:(lia)) as [t [Rt A]]. destruct A as [A1 A2 A3 A4 A5]. assert (Hk : k < W) by lia. destruct (A5 k Hk) as [w [e [m [E [P O]]]]].
    destruct (Nat.eq_dec w 0) as [->|Nz].
    + exists t. split; [exact Rt|]. constructor; auto. intros r Hr. destruct (A5 r Hr) as [w' [e' [m' [E' [P' O']]]]]. exists w', e', m'. repeat split; auto.
      * destruct (O' H0) as [O1 _]. destruct (Nat.eq_dec r k) as [->|]; [|lia]. exfalso. rewrite E in E'. apply (f_equal wanted) in E'. simpl in E'. lia.
      * apply O', H0.
    + destruct (O Nz) as [_ Ph]. destruct (Rd k Hk) as [Bg Wz]. set (u := rank_of (base s) k) in *.
      set (t' := with_rank t k (dress 0 true m u) (SamplesRead [] true false)).
      assert (Tr : transition (own input k) k (depth k) (rank_of t k) (SamplesRead [] true false) = Some (dress 0 true m u)).
      { rewrite E. simpl. replace (w =? 0) with false by (symmetry; apply Nat.eqb_neq; exact Nz). replace (w <? 0) with false by (symmetry; apply Nat.ltb_ge; lia). simpl.
        f_equal. match goal with |- post ?c ?i ?v = _ => destruct (post_eq c i v) as [[-> _]|[Pf _]]; [|change (at_phase u = FILL) in Pf; destruct Ph; congruence] end.
        unfold dress. destruct u. simpl. rewrite Nat.add_0_r, app_nil_r. reflexivity. }
      assert (My : may (own input) input t k (SamplesRead [] true false)).
      { simpl. rewrite E. change (read (dress w e m u)) with (read u). split; [reflexivity|]. split; [|split; [auto|discriminate]]. intros _.
        pose proof (b_read _ _ _ _ _ _ (b_rank _ _ _ _ _ B k Hk) Bg) as Br. fold u in Br. rewrite Wz in Br. unfold input. rewrite content_length. exact Br. }
      exists t'. split; [eapply System.reach_step; [exact Rt|]; exact (StepRank W (own input) depth input t k _ _ Hk My Tr)|].
      constructor; unfold t', with_rank; cbn [got pending running rank_of]; auto.
      * rewrite E. change (has_posted (dress w e m u) (dress 0 true m u)) with (has_posted u u).
        replace (has_posted u u) with false by (unfold has_posted, is_waiting; destruct Ph as [Ph|Ph]; rewrite Ph; reflexivity). exact A2.
      * intros r Hr. destruct (Nat.eq_dec r k) as [->|D].
        -- rewrite update_same. exists 0, true, m. repeat split; auto; contradiction.
        -- rewrite update_other by exact D. destruct (A5 r Hr) as [w' [e' [m' [E' [P' O']]]]]. exists w', e', m'. repeat split; auto; [destruct (O' H0); lia|apply O', H0].
Qed.

(** ** FREE *)

(** Something can happen: no failure, and no consumer that leaves; and that a rank is urged only where [that] is so. *)
Definition goes_on (that : Prop) (s : shared_sys) : Prop :=
  exists s', shared_step s s' /\ forall r, let u := rank_of (base s) r in let v := rank_of (base s') r in
    failure v = failure u /\ stopped v = stopped u /\ (urged v = urged u \/ that).

Lemma goes_on_unless : forall that s s', shared_step s s' -> (forall r, befallen (rank_of (base s') r) = befallen (rank_of (base s) r)) -> goes_on that s.
Proof. intros that s s' St B. exists s'. split; [exact St|]. intros r. specialize (B r). unfold befallen in B. injection B as B1 B2 B3. auto. Qed.

Lemma befallen_of : forall s r u x, befallen u = befallen (rank_of s r) -> forall q, befallen (rank_of (with_rank s r u x) q) = befallen (rank_of s q).
Proof. intros s r u x E q. simpl. destruct (Nat.eq_dec q r) as [->|D]; [rewrite update_same; exact E|rewrite update_other by exact D; reflexivity]. Qed.

Lemma a_rank_goes_on : forall that s r e t, r < W -> begun s r = true -> may_shared cfg order s r e -> unurged (LRank r e) ->
  match e with SamplesRead _ _ _ | Got (Counted _) => False | _ => True end ->
  transition (cfg r) r (depth r) (rank_of (base s) r) e = Some t -> goes_on that s.
Proof.
  intros that s r e t Hr Bg M U X E. pose proof (nothing_befalls _ _ _ _ _ _ U E) as Bf.
  assert (G : forall t', handle_shared (cfg r) r (depth r) (rank_of (base s) r) e = Some t' -> befallen t' = befallen t -> goes_on that s).
  { intros t' Hs Bt. eapply goes_on_unless; [eapply (SharedRank W total cfg depth order deal wish s r e t'); eauto|]. cbn [base]. apply befallen_of. congruence. }
  destruct e as [| |[a|cs|rs]| | | |]; try contradiction; try (apply (G t); [exact E|reflexivity]).
  apply (G (asks_nothing t)); [unfold handle_shared; rewrite E; reflexivity|]. unfold asks_nothing. destruct (at_phase t); reflexivity.
Qed.

Lemma a_rank_is_urged : forall (that : Prop) s r t, that -> r < W -> begun s r = true -> may_shared cfg order s r Urged ->
  transition (cfg r) r (depth r) (rank_of (base s) r) Urged = Some t -> goes_on that s.
Proof.
  intros that s r t Is Hr Bg M E. eexists. split; [eapply (SharedRank W total cfg depth order deal wish s r Urged t); eauto|].
  intros q. cbn [base with_rank rank_of]. destruct (Nat.eq_dec q r) as [->|D]; [rewrite update_same|rewrite update_other by exact D; auto].
  simpl in E. destruct (is_ending _); injection E as <-; auto.
Qed.

(** Something is to be read, or the job waits for what does not hang on reading. *)
Lemma reads_or_has_read : forall that s, shared_reachable s -> goes_on that s \/ has_read s.
Proof.
  intros that s R. destruct (shared_runs W total cfg depth order deal wish ok deal_next deal_feeds wish_some s R) as [B _].
  destruct (dec_exists (fun r => negb (begun s r)) W) as [[r [Hr E]]|Bg].
  { apply negb_true_iff in E. left. eapply goes_on_unless; [eapply (SharedBegins W total cfg depth order deal wish s r); [exact Hr|exact E|reflexivity]|].
    cbn [base]. apply befallen_of. reflexivity. }
  assert (Begun : forall r, r < W -> begun s r = true) by (intros r Hr; specialize (Bg r Hr); apply negb_false_iff in Bg; exact Bg). clear Bg.
  destruct (dec_exists (fun r => negb (wanted (rank_of (base s) r) =? 0)) W) as [[r [Hr E]]|Rd].
  { left. apply negb_true_iff, Nat.eqb_neq in E. pose proof (b_read _ _ _ _ _ _ (b_rank _ _ _ _ _ B r Hr) (Begun r Hr)) as Br. set (u := rank_of (base s) r) in *.
    destruct (skipn (read u) (content order (places s r))) as [|x l] eqn:Sk.
    { exfalso. apply (f_equal (@length sample)) in Sk. rewrite skipn_length, content_length in Sk. simpl in Sk. lia. }
    set (xs := [x]). eapply goes_on_unless.
    - eapply (SharedRank W total cfg depth order deal wish s r (SamplesRead xs false false)); [exact Hr|exact (Begun r Hr)| |].
      + simpl. fold u. rewrite Sk. reflexivity.
      + fold u. unfold handle_shared. replace (wanted u =? 0) with false by (symmetry; apply Nat.eqb_neq; exact E).
        replace (wanted u <? length xs) with false by (symmetry; apply Nat.ltb_ge; simpl; lia). reflexivity.
    - cbn [base]. apply befallen_of. reflexivity. }
  right. intros r Hr. specialize (Rd r Hr). apply negb_false_iff, Nat.eqb_eq in Rd. auto.
Qed.

(** What the job and what follows it have in common. *)
Lemma in_common : forall s t, beside W s t -> forall r, r < W ->
  exists e m, rank_of t r = dress 0 e m (rank_of (base s) r) /\ alike_posts (posted (rank_of (base s) r)) m.
Proof.
  intros s t A r Hr. destruct (a_rank _ _ _ _ A r Hr) as [w [e [m [E [P O]]]]]. destruct (Nat.eq_dec w 0) as [->|Nz]; [eauto|]. destruct (O Nz). lia.
Qed.

(** What follows the job does, the job can do. *)
Lemma the_job_goes_on : forall (that : Prop) input s t l t', shared_reachable s -> has_read s -> beside W s t ->
  match l with LRank _ (ConsumerStopped | LocalFailed _) => False | LRank _ Urged => that | _ => True end ->
  System.step W (own input) depth input t l t' -> goes_on that s.
Proof.
  intros that input s t l t' R Has A U St. pose proof (in_common s t A) as Dress. destruct A as [A1 A2 A3 A4 _].
  destruct St as [t r e v Hr M E|t x Al Re|t r Hr Ru Tk].
  - destruct (Dress r Hr) as [en [m [Er _]]]. rewrite Er in E. destruct (Has r Hr) as [Bg _].
    destruct e as [xs a f| |x| | | |]; try contradiction.
    + simpl in E. discriminate.
    + destruct (accepted_in_any_dress (cfg r) (big W input) r (depth r) 0 en m (rank_of (base s) r) Collated _ Logic.I E) as [v' E']. exact (a_rank_goes_on that s r Collated v' Hr Bg Logic.I Logic.I Logic.I E').
    + destruct M as [M1 M2]. rewrite A2 in M1. rewrite A1 in M2. destruct (nth_alike _ _ A4 _ _ M2) as [y [Y1 Y2]].
      assert (M : may_shared cfg order s r (Got y)) by (split; assumption).
      destruct Y2 as [->|[a [b [-> [-> Al]]]]].
      * destruct y as [a|cs|rs].
        -- destruct (agreed_in_any_dress _ _ _ _ _ _ _ _ a _ _ (or_introl eq_refl) E) as [v' E']. exact (a_rank_goes_on that s r (Got (Agreed a)) v' Hr Bg M Logic.I Logic.I E').
        -- destruct (all_wants_are_told s R _ _ Y1) as [ws To].
           destruct (accepted_in_any_dress (cfg r) (big W input) r (depth r) 0 en m (rank_of (base s) r) (Got (Counted cs)) _ Logic.I E) as [v' E'].
           assert (D : exists v2, transition (cfg r) r (depth r) (draws (length (share_of deal s r ws)) (far_of W deal s r ws =? total) (rank_of (base s) r)) (Got (Counted cs)) = Some v2).
           { simpl in E' |- *. destruct (at_phase (rank_of (base s) r)); try discriminate. unfold count in *. simpl. destruct (negb _); [discriminate|eauto]. }
           destruct D as [v2 E2]. eapply goes_on_unless; [eapply (SharedCounted W total cfg depth order deal wish s r cs ws v2); eauto|].
           cbn [base]. apply befallen_of. rewrite (nothing_befalls _ r _ _ (Got (Counted cs)) _ Logic.I E2). reflexivity.
        -- destruct (accepted_in_any_dress (cfg r) (big W input) r (depth r) 0 en m (rank_of (base s) r) (Got (Reported rs)) _ Logic.I E) as [v' E']. exact (a_rank_goes_on that s r (Got (Reported rs)) v' Hr Bg M Logic.I Logic.I E').
      * destruct (agreed_in_any_dress _ _ _ _ _ _ _ _ _ _ _ Al E) as [v' E']. exact (a_rank_goes_on that s r (Got (Agreed a)) v' Hr Bg M Logic.I Logic.I E').
    + destruct (accepted_in_any_dress (cfg r) (big W input) r (depth r) 0 en m (rank_of (base s) r) StepTaken _ Logic.I E) as [v' E']. simpl in M. rewrite A3 in M. exact (a_rank_goes_on that s r StepTaken v' Hr Bg M Logic.I Logic.I E').
    + destruct (accepted_in_any_dress (cfg r) (big W input) r (depth r) 0 en m (rank_of (base s) r) Urged _ Logic.I E) as [v' E']. simpl in M. rewrite Er in M.
      exact (a_rank_is_urged that s r v' U Hr Bg M E').
  - assert (Ms : Forall2 alike_msg (messages W (base s)) (messages W t)).
    { unfold messages. assert (L : forall q, In q (seq 0 W) -> q < W) by (intros q I; apply in_seq in I; lia). revert L. generalize (seq 0 W).
      induction l as [|q l IH]; intros L; simpl; constructor; [|apply IH; intros z I; apply L; right; exact I].
      destruct (Dress q (L q (or_introl eq_refl))) as [e [m [E P]]]. rewrite E. unfold message. change (posted (dress 0 e m (rank_of (base s) q))) with m.
      destruct P as [->|[o [p [-> [-> P]]]]]; [left; reflexivity|right; eauto]. }
    destruct (alike_reduce _ _ _ (alike_back _ _ Ms) Re) as [y [Ry _]]. eapply goes_on_unless; [eapply (SharedExchange W total cfg depth order deal wish s y)|reflexivity].
    + intros q Hq. rewrite <- A2. apply Al, Hq.
    + exact Ry.
  - eapply goes_on_unless; [eapply (SharedTrained W total cfg depth order deal wish s r Hr)|reflexivity].
    + rewrite <- A3. exact Ru.
    + intros q Hq. specialize (Tk q Hq). destruct (Dress r Hr) as [e [m [E _]]]. destruct (Dress q Hq) as [e' [m' [E' _]]]. rewrite E, E' in Tk. exact Tk.
Qed.

(** FREE with shared shards: while no consumer has left, the job goes on by itself, unurged, or every loader is done and every trainer
    has taken all it was given; failures included. *)
Theorem a_job_of_shared_shards_never_deadlocks : forall s, shared_reachable s -> (forall r, r < W -> stopped (rank_of (base s) r) = false) ->
  goes_on False s \/ forall r, r < W -> finished (base s) r.
Proof.
  intros s R NS. destruct (reads_or_has_read False s R) as [G|Has]; [auto|]. destruct (none_is_open s R Has W (le_n W)) as [t [Rt A]].
  pose proof (in_common s t A) as Dress. set (input := fun r => content order (places s r)) in *.
  destruct (the_coupled_system_never_deadlocks W (own input) depth input (own_ok W cfg ok input) deep t Rt) as [[l [t' [U St]]]|Fin].
  - intros r Hr. destruct (Dress r Hr) as [e [m [-> _]]]. exact (NS r Hr).
  - left. apply (the_job_goes_on False input s t l t' R Has A); [|exact St]. destruct U as [U _]. destruct l as [i e| |i]; try exact Logic.I. destruct e; exact U.
  - right. intros r Hr. destruct (Fin r Hr) as [F1 [F2 F3]]. destruct (Dress r Hr) as [e [m [E _]]]. rewrite E in F1, F3. rewrite (a_running _ _ _ _ A) in F2.
    split; [exact F1|]. split; [exact F2|exact F3].
Qed.

(** STOP, FREE with shared shards: after a consumer has left the job goes on, if need be urged, or every loader is done but those that
    drain to a trainer inside a step which a consumer that left never entered. *)
Theorem with_shared_shards_after_a_stop_every_loader_ends_or_its_trainer_waits : forall s, shared_reachable s ->
  goes_on (exists q, q < W /\ stopped (rank_of (base s) q) = true) s \/
  forall r, r < W -> at_phase (rank_of (base s) r) = DONE \/ (at_phase (rank_of (base s) r) = DRAIN /\ forsaken W (base s) r).
Proof.
  intros s R. set (that := exists q, q < W /\ stopped (rank_of (base s) q) = true). destruct (reads_or_has_read that s R) as [G|Has]; [auto|].
  destruct (none_is_open s R Has W (le_n W)) as [t [Rt A]]. pose proof (in_common s t A) as Dress. set (input := fun r => content order (places s r)) in *.
  destruct (after_a_stop_every_loader_ends_or_its_trainer_waits_for_the_one_that_left W (own input) depth input (own_ok W cfg ok input) deep t Rt) as [[l [t' [U St]]]|Fin].
  - left. apply (the_job_goes_on that input s t l t' R Has A); [|exact St]. destruct l as [i e| |i]; try exact Logic.I. destruct e; try exact Logic.I; try exact U.
    destruct U as [q [Hq Sq]]. exists q. split; [exact Hq|]. destruct (Dress q Hq) as [e [m [E _]]]. rewrite E in Sq. exact Sq.
  - right. intros r Hr. destruct (Dress r Hr) as [e [m [E _]]]. destruct (Fin r Hr) as [F|[F1 [F2 [q [Hq [Sq Tk]]]]]]; rewrite E in *; [left; exact F|right].
    split; [exact F1|]. split; [rewrite <- (a_running _ _ _ _ A); exact F2|]. exists q. split; [exact Hq|]. destruct (Dress q Hq) as [e' [m' [E' _]]]. rewrite E' in *. auto.
Qed.

End Lively.
