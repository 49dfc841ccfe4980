(** AGE: in join mode a sample that is held in round [k] is planned in round [k + A] at the latest. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Types Alignment Machine Local Rank System Facts Keeps Protocol.
Import ListNotations.

Lemma last_n_hd : forall (l : list nat) n, 1 <= n -> n <= length l -> hd 0 (last_n n l) = nth (length l - n) l 0.
Proof.
  assert (X : forall (l : list nat) k, k < length l -> hd 0 (skipn k l) = nth k l 0).
  { induction l as [|x l IH]; intros k K; simpl in K; [lia|]. destruct k; [reflexivity|]. simpl. apply IH. lia. }
  intros l n H L. apply X. lia.
Qed.

Lemma last_n_length : forall (A : Type) (l : list A) n, length (last_n n l) = Nat.min n (length l).
Proof. intros. unfold last_n. rewrite skipn_length. lia. Qed.

Lemma skipn_twice : forall (A : Type) k (l : list A), skipn 1 (skipn k l) = skipn (S k) l.
Proof. induction k as [|k IH]; intros l; [reflexivity|]. destruct l; [reflexivity|]. simpl skipn at 2. rewrite IH. reflexivity. Qed.

Lemma last_n_snoc : forall (A : Type) (l : list A) n x, 1 <= n -> last_n n (last_n n l ++ [x]) = last_n n (l ++ [x]).
Proof.
  intros A l n x H. unfold last_n. rewrite !app_length, skipn_length. simpl length. destruct (le_lt_dec n (length l)) as [L|L].
  - replace (length l - (length l - n) + 1 - n) with 1 by lia. replace (length l + 1 - n) with (S (length l - n)) by lia.
    assert (E : skipn (length l - n) (l ++ [x]) = skipn (length l - n) l ++ [x]).
    { rewrite skipn_app. replace (length l - n - length l) with 0 by lia. reflexivity. }
    rewrite <- (skipn_twice _ (length l - n)), E. reflexivity.
  - replace (length l - n) with 0 by lia. simpl skipn at 2. rewrite Nat.sub_0_r. reflexivity.
Qed.

Lemma in_firstn_nth : forall (A : Type) (l : list A) n x, In x (firstn n l) -> exists j, nth_error l j = Some x.
Proof. intros A l n x H. apply In_nth_error. rewrite <- (firstn_skipn n l). apply in_or_app. auto. Qed.

Lemma nth_error_skipn_add : forall (A : Type) n (l : list A) j, nth_error (skipn n l) j = nth_error l (n + j).
Proof. induction n as [|n IH]; intros l j; [reflexivity|]. destruct l; [destruct j; reflexivity|]. simpl. apply IH. Qed.

(** What reading and marking see. *)
Definition aged (s : state) : list nat * nat * list sample * nat := (marks s, read s, window s, round s).

Lemma aged_post : forall c r s, aged (post c r s) = aged s.
Proof. intros. destruct (post_eq c r s) as [[-> _]|[_ [_ ->]]]; reflexivity. Qed.
Lemma aged_deliver : forall d s, aged (deliver d s) = aged s.
Proof. intros. destruct (deliver_eq d s) as [a [b [_ [-> _]]]]. reflexivity. Qed.
Lemma aged_finish : forall s, aged (finish_when_drained s) = aged s.
Proof. intros. destruct (finish_eq s) as [p [-> _]]. reflexivity. Qed.
Lemma aged_drain : forall d o l s, aged (drain d o l s) = aged s.
Proof. intros. unfold drain. rewrite aged_finish, aged_deliver. reflexivity. Qed.

Lemma read_of_aged : forall s t, aged s = aged t -> read s = read t.
Proof. unfold aged. congruence. Qed.

Definition reads (e : event) : list sample := match e with SamplesRead xs _ => xs | _ => [] end.

Lemma aged_transition : forall c r d s e t, (forall x, e <> Got x) -> transition c r d s e = Some t ->
  aged t = (marks s, read s + length (reads e), window s ++ reads e, round s).
Proof.
  intros c r d s e t NG E. assert (Z : aged s = (marks s, read s + 0, window s ++ [], round s)) by (rewrite Nat.add_0_r, app_nil_r; reflexivity).
  destruct e as [xs en| |x| | |cause|]; simpl in E; simpl reads; simpl length.
  - destruct (_ || _); [discriminate|]. injection E as <-. rewrite aged_post. reflexivity.
  - destruct (collated s); [discriminate|]. injection E as <-. rewrite aged_post. exact Z.
  - exfalso. eapply NG. reflexivity.
  - destruct (queue s); [discriminate|]. destruct (below _ _); [|discriminate]. injection E as <-.
    destruct (at_phase _); rewrite ?aged_post, ?aged_finish, aged_deliver; exact Z.
  - cbv zeta in E. change (at_phase (set_limit _ _)) with (at_phase s) in E. destruct (at_phase s); try (injection E as <-; exact Z); (destruct (stopped s); [injection E as <-; exact Z|]);
    injection E as <-; rewrite ?aged_post, ?aged_finish; exact Z.
  - destruct (_ || _); injection E as <-; rewrite ?aged_post; exact Z.
  - destruct (is_ending s); injection E as <-; rewrite ?aged_post; exact Z.
Qed.

(** What has been read is not unread. *)
Lemma read_grows : forall c r d s e t, transition c r d s e = Some t -> read s <= read t.
Proof.
  intros c r d s e t E. assert (Cases : (exists y, e = Got y) \/ (forall y, e <> Got y)) by (destruct e; eauto; right; discriminate). destruct Cases as [[y ->]|NG].
  2:{ pose proof (aged_transition _ _ _ _ _ _ NG E) as A. unfold aged in A. injection A as _ A _ _. lia. }
  apply Nat.eq_le_incl. simpl in E. destruct y as [a|cs|rs]; destruct (at_phase s); try discriminate.
  - unfold agree in E. destruct (is_bad a); [injection E as <-; reflexivity|]. destruct (negb _); [discriminate|].
    destruct (o_stop_rank a); [injection E as <-; symmetry; etransitivity; [apply read_of_aged, aged_drain|reflexivity]|]. destruct (negb _); [discriminate|]. destruct (target c a).
    + injection E as <-. symmetry. etransitivity; [apply read_of_aged, aged_drain|reflexivity].
    + destruct (c_align _ _ _ _). injection E as <-. symmetry. etransitivity; [apply read_of_aged, aged_deliver|reflexivity].
  - unfold count in E. destruct (negb _); [discriminate|]. injection E as <-. symmetry. etransitivity; [apply read_of_aged, aged_post|reflexivity].
  - destruct (failure_of rs); [|discriminate]. injection E as <-. symmetry. etransitivity; [apply read_of_aged, aged_drain|reflexivity].
Qed.

Section Age.
Variable N : nat.
Variable cfg : nat -> config.
Variable depth : nat -> nat.
Variable input : nat -> list sample.
Hypothesis ok : setting_ok N cfg.
(** Join mode, on every rank; positions count a rank's input from 0. *)
Hypothesis join : forall r, r < N -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None.
Hypothesis placed : forall r i x, r < N -> nth_error (input r) i = Some x -> pos x = i.
Notation reachable := (System.reachable N cfg depth input).
Notation invariant := (System.invariant N cfg depth input).
Notation step := (System.step N cfg depth input).
Notation leads := (System.leads N cfg depth input).
Notation hist_of := (System.hist_of cfg).
Notation whole := (Facts.whole cfg).

(** A sound agreement is sane: kept in the log. *)
Definition sane_entry (p : list msg * result) : Prop :=
  match snd p with Agreed a => is_bad a = false -> o_stop_rank a = None -> o_samples_max a <> 0 -> sane a | _ => True end.

Lemma logged_agreements_are_sane : forall s, reachable s -> Forall sane_entry (log s).
Proof.
  induction 1 as [|s l t R IH St]; [constructor|]. pose proof (invariant_of N cfg depth input ok s R) as I.
  destruct St as [s r e t H M E|s x P Rd|s r H Ru Tk]; simpl; try exact IH. apply Forall_app. split; [exact IH|]. constructor; [|constructor].
  unfold sane_entry. simpl. destruct x as [a| |]; auto. intros B Sr NZ.
  destruct (good_agreement_facts N cfg depth input ok s a I P Rd B Sr) as [_ [G _]]. apply G, NZ.
Qed.

(** Every mark of every rank, in full: how many samples it had read when each round's window was offered and agreed on. *)
Definition remark (s : sys) (l : label) (t : sys) (m : nat -> list nat) : nat -> list nat :=
  match l with
  | LRank r (Got (Agreed _)) =>
      match at_phase (rank_of t r) with COUNT => update m r (m r ++ [read (rank_of s r)]) | _ => m end
  | _ => m
  end.

Inductive marked : sys -> (nat -> list nat) -> Prop :=
| marked_start : marked (start cfg) (fun _ => [])
| marked_step : forall s l t m, marked s m -> step s l t -> marked t (remark s l t m).

Lemma every_reachable_state_is_marked : forall s, reachable s -> exists m, marked s m.
Proof. induction 1 as [|s l t R [m M] St]; [eexists; constructor|]. eexists. eapply marked_step; eauto. Qed.

Lemma marked_reachable : forall s m, marked s m -> reachable s.
Proof. induction 1; [constructor|eapply reach_step; eauto]. Qed.

Definition count_phase (s : state) : nat := match at_phase s with COUNT => 1 | _ => 0 end.

Record young (age : nat) (s : state) (m : list nat) : Prop := {
  y_read : forall k, k < length m -> nth k m 0 <= read s;
  y_marks : marks s = last_n age m;
  y_length : length m = round s + count_phase s;
  y_window : forall x k, In x (window s) -> k < length m -> pos x < nth k m 0 -> length m <= k + age;
  y_aligned : forall x k, In x (concat (aligned s)) -> k < length m -> pos x < nth k m 0 -> round s <= k + age;
  y_steps : forall y x k, In y (steps_of s) -> In x (s_group y) -> k < length m -> pos x < nth k m 0 -> s_round y <= k + age }.

Lemma nth_snoc : forall (m : list nat) v k, k < length (m ++ [v]) -> (k < length m /\ nth k (m ++ [v]) 0 = nth k m 0) \/ (k = length m /\ nth k (m ++ [v]) 0 = v).
Proof.
  intros m v k L. rewrite app_length in L. simpl in L. destruct (lt_dec k (length m)) as [H|H]; [left; split; [exact H|apply app_nth1, H]|right].
  assert (k = length m) by lia. subst. split; [reflexivity|]. rewrite app_nth2, Nat.sub_diag by lia. reflexivity.
Qed.

Lemma make_steps_in : forall gs cs n rd y, In y (make_steps n rd gs cs) -> s_round y = rd /\ In (s_group y) gs.
Proof.
  induction gs as [|g gs IH]; intros cs n rd y H; [destruct H|]. destruct cs as [|c cs]; [destruct H|]. simpl in H. destruct H as [<-|H]; [simpl; auto|].
  destruct (IH _ _ _ _ H) as [A B]. simpl. auto.
Qed.

Lemma every_marked_state_is_young : forall s m, marked s m -> forall r, r < N -> young (c_max_age (cfg r)) (rank_of s r) (m r).
Proof.
  induction 1 as [|s l t m M IH St]; intros r H.
  - constructor; simpl; try lia; try easy. 
  - pose proof (marked_reachable s m M) as R. pose proof (invariant_of N cfg depth input ok s R) as I.
    destruct St as [s i e t Hi My E|s x P Rd|s i Hi Ru Tk]; [|exact (IH r H)|exact (IH r H)].
    match goal with |- young _ (rank_of ?x r) _ => set (s' := x) end.
    destruct (Nat.eq_dec r i) as [->|NE].
    2:{ replace (rank_of s' r) with (rank_of s r) by (simpl; rewrite update_other by exact NE; reflexivity).
        replace (remark s (LRank i e) s' m r) with (m r); [exact (IH r H)|]. unfold remark. destruct e as [| |[a| |]| | | |]; try reflexivity.
        destruct (at_phase (rank_of s' i)); try reflexivity. rewrite update_other by exact NE. reflexivity. }
    specialize (IH i H). pose proof (g_core _ _ _ _ _ I i H) as K. pose proof (rank_step_after N cfg depth input ok s i e t I H My E) as K'.
    assert (Rt : rank_of s' i = t) by (simpl; apply update_same). rewrite Rt. set (u := rank_of s i) in *. set (age := c_max_age (cfg i)) in *.
    pose proof (ok_age _ (configs_ok _ _ ok i H)) as A1. fold age in A1.
    assert (Cases : (exists y, e = Got y) \/ (forall y, e <> Got y)) by (destruct e; eauto; right; discriminate). destruct Cases as [[y ->]|NG].
    + destruct (got_current N cfg depth input ok s i y I H My) as [Gl [_ [Wh [ms [El Em]]]]]. simpl in E. fold u in E. destruct y as [a|cs|rs]; destruct (at_phase u) eqn:Ph; try discriminate.
      * destruct (agree_cases _ _ _ _ _ _ E) as [C [S1 [_ [_ S2]]]].
        assert (Rd : read t = read u /\ round t = round u /\ (at_phase t <> COUNT -> marks t = marks u) /\ (at_phase t = COUNT -> marks t = last_n age (marks u ++ [read u]))).
        { unfold agree in E. destruct (is_bad a); [injection E as <-; simpl; repeat split; auto; discriminate|]. destruct (negb _); [discriminate|]. destruct (o_stop_rank a).
          - injection E as <-. match goal with |- context[drain ?d ?o ?l ?v] => pose proof (aged_drain d o l v) as Z; destruct (drain_phase d o l v) as [Pz|Pz] end; unfold aged in Z; simpl in Z; injection Z as Z1 Z2 Z3 Z4; rewrite Pz; repeat split; auto; discriminate.
          - destruct (negb _); [discriminate|]. destruct (target (cfg i) a).
            + injection E as <-. match goal with |- context[drain ?d ?o ?l ?v] => pose proof (aged_drain d o l v) as Z; destruct (drain_phase d o l v) as [Pz|Pz] end; unfold aged in Z; simpl in Z; injection Z as Z1 Z2 Z3 Z4; rewrite Pz; repeat split; auto; discriminate.
            + destruct (c_align _ _ _ _). injection E as <-. match goal with |- context[deliver ?d ?v] => pose proof (aged_deliver d v) as Z; destruct (deliver_same d v) as [Pz _] end; unfold aged in Z; simpl in Z; injection Z as Z1 Z2 Z3 Z4; rewrite Pz; repeat split; auto; simpl; intros X; exfalso; apply X; reflexivity. }
        destruct Rd as [Rd1 [Rd2 [Rd3 Rd4]]]. destruct IH as [Y1 Y2 Y3 Y4 Y5 Y6]. unfold count_phase in Y3. rewrite Ph in Y3.
        assert (Dec : at_phase t = COUNT \/ at_phase t <> COUNT) by (destruct (at_phase t); auto; right; discriminate). destruct Dec as [Pt|Pt].
        -- replace (remark s (LRank i (Got (Agreed a))) s' m i) with (m i ++ [read u]) by (unfold remark; rewrite Rt, Pt, update_same; reflexivity).
           destruct C as [_ P2 _ _|? _ _ [P2|P2] _|_ _ _ _ [P2|P2] _|n B Sr Ra Tg _ _ Al Ca]; try congruence.
           destruct (k_offer _ _ _ _ _ _ K Ph) as [o [Po O]]. pose proof (log_entry N cfg depth input s _ _ I El) as [_ [ER _]]. simpl in ER.
           destruct (reduce_agreed _ _ ER) as [os [-> A]]. unfold message in Em. fold u in Em. rewrite Po in Em. apply nth_error_In in Em. apply in_map_iff in Em as [o' [Eo Io]]. injection Eo as ->.
           destruct (of_ready _ _ _ _ O (ag_ready _ _ A o Io Ra)) as [_ [_ [R3 [_ [_ [_ R7]]]]]].
           assert (NZ : o_samples_max a <> 0) by (intros Z; unfold target in Tg; rewrite Z in Tg; discriminate).
           pose proof (logged_agreements_are_sane s R) as LS. rewrite Forall_forall in LS. specialize (LS _ (nth_error_In _ _ El) B Sr NZ).
           pose proof (ok_rule _ (configs_ok _ _ ok i H) a LS) as Bd. destruct (join i H) as [J1 _].
           assert (Due : count_due (due_before (cfg i) u) (groups u) <= S n).
           { rewrite <- R7. pose proof (ag_due _ _ A o Io). unfold target in Tg. rewrite J1 in Tg. destruct (_ || _); [discriminate|]. lia. }
           pose proof (ok_align_due _ (configs_ok _ _ ok i H) _ _ _ Due) as Fc. rewrite <- Ca in Fc. rewrite Forall_forall in Fc.
           assert (Pm : Permutation (concat (aligned t) ++ window t) (window u)).
           { rewrite Al, Ca, (ok_align_perm _ (configs_ok _ _ ok i H)), R3. apply (ok_group_perm _ (configs_ok _ _ ok i H)). }
           constructor.
           ++ intros k Lk. rewrite Rd1. destruct (nth_snoc _ _ _ Lk) as [[L ->]|[-> ->]]; [apply Y1, L|lia].
           ++ rewrite (Rd4 Pt), Y2. apply last_n_snoc, A1.
           ++ rewrite app_length, Y3, Rd2. unfold count_phase. rewrite Pt. simpl. lia.
           ++ intros x k Hx Lk Lp. rewrite app_length. simpl. destruct (nth_snoc _ _ _ Lk) as [[L E1]|[-> E1]]; rewrite E1 in Lp; [|lia].
              assert (Hu : In x (window u)) by (apply (Permutation_in _ Pm), in_or_app; auto). pose proof (Y4 x k Hu L Lp) as B1.
              destruct (Nat.eq_dec (length (m i)) (k + age)) as [Q|Q]; [exfalso|lia].
              specialize (Fc x Hx). unfold due_before in Fc. rewrite Y2, last_n_length in Fc. fold age in Fc.
              replace (Nat.min age (length (m i)) =? age) with true in Fc by (symmetry; apply Nat.eqb_eq; lia). rewrite last_n_hd in Fc by lia.
              replace (length (m i) - age) with k in Fc by lia. lia.
           ++ intros x k Hx Lk Lp. rewrite Rd2. destruct (nth_snoc _ _ _ Lk) as [[L E1]|[-> E1]]; rewrite E1 in Lp; [|lia].
              assert (Hu : In x (window u)) by (apply (Permutation_in _ Pm), in_or_app; auto). pose proof (Y4 x k Hu L Lp). lia.
           ++ intros y x k Hy Hx Lk Lp. rewrite S1 in Hy. destruct (nth_snoc _ _ _ Lk) as [[L E1]|[-> E1]]; rewrite E1 in Lp; [apply (Y6 y x k Hy Hx L Lp)|].
              pose proof (history_rounds (cfg 0) (firstn (got s i) (results s))) as Hr. change (history _ _) with (hist_of s i) in Hr. rewrite <- (k_steps _ _ _ _ _ _ K), <- (k_round _ _ _ _ _ _ K) in Hr.
              rewrite Forall_forall in Hr. specialize (Hr (shared y) (in_map shared _ _ Hy)). unfold shared in Hr. simpl in Hr. fold u in Hr. lia.
        -- replace (remark s (LRank i (Got (Agreed a))) s' m i) with (m i) by (unfold remark; rewrite Rt; destruct (at_phase t); try reflexivity; exfalso; apply Pt; reflexivity).
           destruct (S2 Pt) as [Sa [Sw _]]. constructor; rewrite ?S1, ?Sa, ?Sw, ?Rd1, ?Rd2; auto; [rewrite (Rd3 Pt); exact Y2|].
           unfold count_phase. destruct (at_phase t); try exact Y3. exfalso. apply Pt. reflexivity.
      * replace (remark s (LRank i (Got (Counted cs))) s' m i) with (m i) by reflexivity.
        pose proof (k_plan _ _ _ _ _ _ K Ph) as Pl. unfold count in E. destruct (length cs =? length (aligned u)) eqn:Lc; [|discriminate]. apply Nat.eqb_eq in Lc. simpl in E. injection E as <-.
        destruct (join i H) as [_ J2]. assert (Cut : cut (cfg i) (gsum u) cs = length cs) by (unfold cut; rewrite J2; reflexivity). rewrite Cut, Lc, skipn_all, firstn_all. simpl is_nil. cbv iota.
        match goal with |- young _ (post ?c ?r ?v) _ => set (v0 := v); assert (Sm : same v0 (post c r v0)) by (apply same_post, same_refl); pose proof (aged_post c r v0) as Ag;
          assert (Pp : count_phase (post c r v0) = 0) by (unfold count_phase; destruct (post_phase c r v0) as [-> |[_ ->]]; reflexivity) end.
        unfold aged in Ag. injection Ag as Ag1 Ag2 Ag3 Ag4. destruct IH as [Y1 Y2 Y3 Y4 Y5 Y6]. unfold count_phase in Y3. rewrite Ph in Y3.
        constructor; rewrite ?Ag1, ?Ag2, ?Ag3, ?Ag4; auto.
        -- rewrite Pp, Y3. simpl. lia.
        -- rewrite (sa_aligned _ _ Sm). intros x k [].
        -- rewrite (sa_steps _ _ Sm). unfold steps_of, v0. simpl. intros y x k Hy Hx Lk Lp. rewrite !app_assoc in Hy. apply in_app_or in Hy as [Hy|Hy].
           ++ apply (Y6 y x k); auto. unfold steps_of. rewrite Pl, app_nil_r, !app_assoc in *. exact Hy.
           ++ apply make_steps_in in Hy as [-> Hg]. apply (Y5 x k); auto. apply in_concat. eauto.
      * replace (remark s (LRank i (Got (Reported rs))) s' m i) with (m i) by reflexivity. destruct (failure_of rs); [|discriminate]. injection E as <-.
        match goal with |- young _ (drain ?d ?o ?l ?v) _ => destruct (drain_same_plain d o l v) as [D1 [D2 _]]; pose proof (aged_drain d o l v) as Ag; assert (Pp : count_phase (drain d o l v) = 0) by (unfold count_phase; destruct (drain_phase d o l v) as [-> | ->]; reflexivity) end.
        unfold aged in Ag. injection Ag as Ag1 Ag2 Ag3 Ag4. destruct IH as [Y1 Y2 Y3 Y4 Y5 Y6]. unfold count_phase in Y3. rewrite Ph in Y3.
        constructor; rewrite ?Ag1, ?Ag2, ?Ag3, ?Ag4, ?D1, ?D2; auto. rewrite Pp. exact Y3.
    + replace (remark s (LRank i e) s' m i) with (m i) by (unfold remark; destruct e as [| |y| | | |]; try reflexivity; exfalso; eapply NG; reflexivity).
      pose proof (aged_transition _ _ _ _ _ _ NG E) as Ag. fold u in Ag. unfold aged in Ag. injection Ag as Ag1 Ag2 Ag3 Ag4. pose proof (transition_same _ _ _ _ _ _ NG E) as Sm. fold u in Sm.
      destruct IH as [Y1 Y2 Y3 Y4 Y5 Y6]. constructor; rewrite ?Ag1, ?Ag2, ?Ag4, ?(sa_aligned _ _ Sm), ?(sa_steps _ _ Sm); auto.
      * intros k Lk. specialize (Y1 k Lk). lia.
      * rewrite Y3. f_equal. unfold count_phase.
        replace (next_hist (cfg 0) (hist_of s i) e) with (hist_of s i) in K' by (destruct e; try reflexivity; exfalso; eapply NG; reflexivity).
        pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ K)) as P1. pose proof (phase_of_kind _ _ _ _ (k_kind _ _ _ _ _ _ K')) as P2. fold u in P1.
        destruct (h_kind (hist_of s i)); [destruct P1 as [-> | ->], P2 as [-> | ->]|rewrite P1, P2|rewrite P1, P2|destruct P1 as [-> | ->], P2 as [-> | ->]]; reflexivity.
      * intros x k Hx Lk Lp. rewrite Ag3 in Hx. apply in_app_or in Hx as [Hx|Hx]; [apply (Y4 x k Hx Lk Lp)|]. exfalso. specialize (Y1 k Lk).
        destruct e as [xs en| | | | | |]; try (destruct Hx; fail). simpl in Hx. destruct My as [Ex _]. fold u in Ex. rewrite Ex in Hx. apply in_firstn_nth in Hx.
        destruct Hx as [j Hj]. rewrite nth_error_skipn_add in Hj. apply (placed i _ _ H) in Hj. lia.
Qed.

(** AGE: [m] holds rank r's marks: entry [k] is how many samples it had read by the end of round k's window. *)
Theorem a_sample_held_in_a_round_is_planned_at_most_max_age_rounds_later : forall s m r y x k, marked s m -> r < N ->
  In y (steps_of (rank_of s r)) -> In x (s_group y) -> k < length (m r) -> pos x < nth k (m r) 0 -> s_round y <= k + c_max_age (cfg r).
Proof. intros s m r y x k M H. apply (y_steps _ _ _ (every_marked_state_is_young s m M r H)). Qed.

(** AGE: and what is still held is not too old yet. *)
Theorem a_held_sample_is_never_older_than_max_age_rounds : forall s m r x k, marked s m -> r < N ->
  In x (window (rank_of s r)) -> k < length (m r) -> pos x < nth k (m r) 0 -> round (rank_of s r) <= k + c_max_age (cfg r).
Proof.
  intros s m r x k M H Hx Lk Lp. pose proof (every_marked_state_is_young s m M r H) as Y. pose proof (y_window _ _ _ Y x k Hx Lk Lp). pose proof (y_length _ _ _ Y). lia.
Qed.

(** AGE: what is due in a round is what was read by the end of the window [max_age] rounds before (R4.3). *)
Theorem what_is_due_is_what_was_held_max_age_rounds_before : forall s m r, marked s m -> r < N -> at_phase (rank_of s r) <> COUNT ->
  due_before (cfg r) (rank_of s r) =
  if c_max_age (cfg r) <=? round (rank_of s r) then nth (round (rank_of s r) - c_max_age (cfg r)) (m r) 0 else 0.
Proof.
  intros s m r M H P. pose proof (every_marked_state_is_young s m M r H) as Y. pose proof (ok_age _ (configs_ok _ _ ok r H)) as A1.
  pose proof (y_length _ _ _ Y) as L. assert (Z : count_phase (rank_of s r) = 0) by (unfold count_phase; destruct (at_phase (rank_of s r)); congruence).
  rewrite Z, Nat.add_0_r in L. unfold due_before. rewrite (y_marks _ _ _ Y), last_n_length, L.
  destruct (c_max_age (cfg r) <=? round (rank_of s r)) eqn:B.
  - apply Nat.leb_le in B. replace (Nat.min _ _ =? _) with true by (symmetry; apply Nat.eqb_eq; lia). rewrite last_n_hd by lia. rewrite L. reflexivity.
  - apply Nat.leb_gt in B. replace (Nat.min _ _ =? _) with false by (symmetry; apply Nat.eqb_neq; lia). reflexivity.
Qed.

(** Marks that are added later are at least what had been read before. *)
Lemma later_marks : forall s t, leads s t -> forall m, marked s m -> exists m', marked t m' /\
  forall r, read (rank_of s r) <= read (rank_of t r) /\ exists more, m' r = m r ++ more /\ Forall (fun v => read (rank_of s r) <= v) more.
Proof.
  induction 1 as [s|s t l u L IH St]; intros m M.
  - exists m. split; [exact M|]. intros r. split; [lia|]. exists []. rewrite app_nil_r. auto.
  - destruct (IH m M) as [m' [M' X]]. exists (remark t l u m'). split; [eapply marked_step; eauto|]. intros r. destruct (X r) as [X1 [more [X2 X3]]]. split.
    + destruct St as [t i e v Hi My E|t x P Rd|t i Hi Ru Tk]; simpl; try exact X1. destruct (Nat.eq_dec r i) as [->|NE]; [rewrite update_same; apply read_grows in E; lia|rewrite update_other by exact NE; exact X1].
    + assert (Keep : exists more, m' r = m r ++ more /\ Forall (fun v => read (rank_of s r) <= v) more) by eauto.
      destruct l as [i e| |i]; simpl; try exact Keep. destruct e as [| |[a| |]| | | |]; try exact Keep. destruct (at_phase (rank_of u i)); try exact Keep.
      destruct (Nat.eq_dec r i) as [->|NE]; [|rewrite update_other by exact NE; exact Keep]. rewrite update_same. exists (more ++ [read (rank_of t i)]). rewrite X2, app_assoc. split; [reflexivity|].
      apply Forall_app. split; [exact X3|]. constructor; [exact X1|constructor].
Qed.

(** AGE, as spec/properties.md has it: [x] is held in the window of a round; when that round and [max_age] more are over, it is in a
    step of one of them. *)
Theorem a_sample_held_in_round_k_is_in_a_step_of_round_k_plus_max_age_at_the_latest : forall s t r x, reachable s -> leads s t -> r < N ->
  at_phase (rank_of s r) <> COUNT -> In x (window (rank_of s r)) -> round (rank_of s r) + c_max_age (cfg r) < round (rank_of t r) ->
  exists y, In y (steps_of (rank_of t r)) /\ In x (s_group y) /\ s_round y <= round (rank_of s r) + c_max_age (cfg r).
Proof.
  intros s t r x R Ld H P Hx Lr. destruct (every_reachable_state_is_marked s R) as [m M]. destruct (later_marks s t Ld m M) as [m' [M' X]].
  destruct (X r) as [X1 [more [X2 X3]]]. pose proof (leads_reachable _ _ _ _ s t Ld R) as R'.
  pose proof (y_length _ _ _ (every_marked_state_is_young s m M r H)) as L. pose proof (every_marked_state_is_young t m' M' r H) as Y.
  assert (Z : count_phase (rank_of s r) = 0) by (unfold count_phase; destruct (at_phase (rank_of s r)); congruence). rewrite Z, Nat.add_0_r in L.
  pose proof (y_length _ _ _ Y) as L'. assert (Lk : round (rank_of s r) < length (m' r)) by lia.
  assert (V : read (rank_of s r) <= nth (round (rank_of s r)) (m' r) 0).
  { rewrite X2, app_length in *. rewrite app_nth2, L, Nat.sub_diag by lia. destruct more as [|v more]; [simpl in *; lia|]. inversion X3; subst. assumption. }
  pose proof (g_core _ _ _ _ _ (invariant_of N cfg depth input ok s R) r H) as K. pose proof (g_core _ _ _ _ _ (invariant_of N cfg depth input ok t R') r H) as K'.
  assert (Hi : In x (firstn (read (rank_of s r)) (input r))).
  { apply (Permutation_in _ (k_cons _ _ _ _ _ _ K)). apply in_or_app. right. apply in_or_app. right. exact Hx. }
  assert (Px : pos x < nth (round (rank_of s r)) (m' r) 0).
  { apply In_nth_error in Hi as [j Hj]. assert (Lj : j < length (firstn (read (rank_of s r)) (input r))) by (apply nth_error_Some; congruence). rewrite firstn_length in Lj.
    assert (Hj' : nth_error (input r) j = Some x) by (rewrite <- (firstn_skipn (read (rank_of s r)) (input r)), nth_error_app1 by (rewrite firstn_length; lia); exact Hj).
    rewrite (placed r j x H Hj'). lia. }
  assert (Ht : In x (firstn (read (rank_of t r)) (input r))).
  { replace (read (rank_of t r)) with (read (rank_of s r) + (read (rank_of t r) - read (rank_of s r))) by lia. rewrite firstn_add. apply in_or_app. auto. }
  apply (Permutation_in _ (Permutation_sym (k_cons _ _ _ _ _ _ K'))) in Ht. apply in_app_or in Ht as [Ht|Ht]; [|exfalso; apply in_app_or in Ht as [Ht|Ht]].
  - unfold samples_of in Ht. apply in_concat in Ht as [g [Hg Hx']]. apply in_map_iff in Hg as [y [<- Hy]]. exists y. split; [exact Hy|]. split; [exact Hx'|].
    apply (y_steps _ _ _ Y y x _ Hy Hx' Lk Px).
  - pose proof (y_aligned _ _ _ Y x _ Ht Lk Px). lia.
  - pose proof (y_window _ _ _ Y x _ Ht Lk Px). lia.
Qed.

End Age.
