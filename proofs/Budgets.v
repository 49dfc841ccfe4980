(** Budgets that change (R15): which budget bounds the groups of a round on each rank, whatever each rank accepts, and when. Spec: R15.1,
    R15.3.

    The budget under which a rank begins, and the budget that it accepts when it makes an offer, are arbitrary functions of rank and round.
    What a rank is told between two offers has no effect before the second of them. The differential tests turn what was told into such
    a function. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol.
Import ListNotations.

(** The agreed budgets, one for each round; [None] is the largest budget. *)
Definition agreed_budgets (rs : list result) : list (option nat) :=
  flat_map (fun x => match x with Agreed a => [o_budget a] | _ => [] end) rs.

(** The budget in force on rank [r] in round [k]: at first the rank's own, then the one agreed on in the round before. *)
Definition in_force (c : config) (r : nat) (rs : list result) (k : nat) : option nat :=
  match k with 0 => c_first c r | S j => nth j (agreed_budgets rs) None end.

(** The least that any of [W] ranks accepts in round [k]. *)
Definition least_accepted (c : config) (W k : nat) : option nat :=
  fold_left min_opt (map (fun q => c_accepts c q k) (seq 0 W)) None.

Lemma agreed_budgets_app : forall rs qs, agreed_budgets (rs ++ qs) = agreed_budgets rs ++ agreed_budgets qs.
Proof. intros. apply flat_map_app. Qed.

Lemma in_force_app : forall c r rs qs k, k <= length (agreed_budgets rs) -> in_force c r (rs ++ qs) k = in_force c r rs k.
Proof. intros c r rs qs [|k] L; [reflexivity|]. simpl. rewrite agreed_budgets_app, app_nth1 by lia. reflexivity. Qed.

Lemma reduce_budgets : forall ms a, reduce ms = Some (Agreed a) -> exists os, ms = map MOffer os /\
  o_budget a = fold_left min_opt (map o_budget os) None.
Proof.
  intros ms a R. destruct (reduce_is _ _ R) as [os [E [_ [o [l [-> ->]]]]]]. exists (o :: l). split; [exact E|].
  rewrite (fold_field o_budget (fun _ _ => eq_refl)). simpl. destruct (o_budget o); reflexivity.
Qed.

(** [a] is no more than [b]; [None] is more than any number. *)
Definition at_most (a b : option nat) : Prop := match b with None => True | Some n => exists m, a = Some m /\ m <= n end.

Theorem the_least_accepted_is_no_more_than_any_rank_accepts : forall c W k,
  (forall q, q < W -> at_most (least_accepted c W k) (c_accepts c q k)) /\
  (least_accepted c W k = None \/ exists q, q < W /\ least_accepted c W k = c_accepts c q k).
Proof.
  intros c W k. unfold least_accepted. pose proof (fold_least (map (fun q => c_accepts c q k) (seq 0 W)) None) as L.
  assert (Is : forall q, q < W -> In (c_accepts c q k) (None :: map (fun q => c_accepts c q k) (seq 0 W)))
    by (intros q H; right; apply (in_map (fun q => c_accepts c q k)), in_seq; lia).
  destruct (fold_left _ _ _) as [n|]; split; auto.
  - intros q H. specialize (Is q H). destruct (c_accepts c q k) as [b|]; [|exact Logic.I]. exists n. split; [reflexivity|apply L, Is].
  - right. destruct L as [[L|L] _]; [discriminate|]. apply in_map_iff in L as [q [E I]]. apply in_seq in I. exists q. split; [lia|auto].
  - intros q H. rewrite (L _ (Is q H)). exact Logic.I.
Qed.

Section Budgets.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Notation reachable := (System.reachable W cfg depth input).

(** A property of every group that is formed under a budget, which alignment keeps. *)
Variable keeps : option nat -> group -> Prop.
Hypothesis formed : forall r b w, r < W -> Forall (keeps b) (c_group (cfg r) b w).
Hypothesis aligned_keeps : forall r b k gs t d, r < W -> Forall (keeps b) gs -> Forall (keeps b) (fst (c_align (cfg r) k gs t d)).

(** The invariant of a rank, in terms of the results that it has received. *)
Definition bounded (c : config) (r : nat) (rs : list result) (h : hist) (u : state) : Prop :=
  match h_kind h with
  | NOffer => length (agreed_budgets rs) = round u /\ budget u = in_force c r rs (round u)
  | NCount _ => length (agreed_budgets rs) = S (round u) /\ budget u = in_force c r rs (S (round u)) /\
      Forall (keeps (in_force c r rs (round u))) (aligned u)
  | _ => True
  end /\
  Forall (fun x => s_round x < length (agreed_budgets rs) /\ keeps (in_force c r rs (s_round x)) (s_group x)) (steps_of u).

Lemma bounded_same : forall c r rs h u t, same u t -> bounded c r rs h u -> bounded c r rs h t.
Proof.
  intros c r rs h u t S B. unfold bounded in *. rewrite (sa_budget _ _ S), (sa_round _ _ S), (sa_aligned _ _ S), (sa_steps _ _ S). exact B.
Qed.

Lemma older_steps : forall c r rs x (xs : list Machine.step),
  Forall (fun y => s_round y < length (agreed_budgets rs) /\ keeps (in_force c r rs (s_round y)) (s_group y)) xs ->
  Forall (fun y => s_round y < length (agreed_budgets (rs ++ [x])) /\ keeps (in_force c r (rs ++ [x]) (s_round y)) (s_group y)) xs.
Proof.
  intros c r rs x xs F. eapply Forall_impl; [|exact F]. intros y [L K]. rewrite in_force_app by lia. split; [|exact K].
  rewrite agreed_budgets_app, app_length. lia.
Qed.

Lemma every_rank_is_bounded : forall s r, reachable s -> r < W -> bounded (cfg r) r (seen s r) (hist_of cfg s r) (rank_of s r).
Proof.
  intros s r R. revert s R r. apply (each_rank_always W cfg depth input ok (fun r rs u => bounded (cfg r) r rs (history (cfg 0) rs) u)).
  - intros r H. split; [split; reflexivity|constructor].
  - intros s i e t R H M NG E IH. exact (bounded_same _ _ _ _ _ _ (transition_same _ _ _ _ _ _ NG E) IH).
  - intros s i y t R H M E IH. pose proof (invariant_of W cfg depth input ok s R) as I. pose proof (g_core _ _ _ _ _ I i H) as K. unfold System.hist_from in K.
    rewrite history_snoc. set (rs := seen s i) in *. set (h := history (cfg 0) rs) in *.
    pose proof (may_admissible W cfg depth input (some_rank _ _ ok) (prints_differ _ _ ok) s i _ I H M) as Ad.
    pose proof (k_kind _ _ _ _ _ _ K) as Kk. unfold kind_ok in Kk. pose proof (k_round _ _ _ _ _ _ K) as Kr.
    destruct IH as [IH1 IH2]. simpl in E. destruct y as [a|cs|ps]; destruct (at_phase (rank_of s i)) eqn:Ph; try discriminate.
    + destruct Ad as [Ec Ad]. rewrite Kk in IH1. destruct IH1 as [B1 B2]. destruct (agree_cases _ _ _ _ _ _ E) as [C [S1 [_ [_ S2]]]].
      pose proof (agree_round _ _ _ _ _ _ E) as Rt. split; [|rewrite S1; apply older_steps, IH2].
      assert (Ln : length (agreed_budgets (rs ++ [Agreed a])) = S (round t)) by (rewrite agreed_budgets_app, app_length, B1, Rt; simpl; lia).
      unfold h_step. rewrite Kk. destruct C as [Ba P2 _ _|q Ba Sr P2 _|Ba Sr Ra Tg P2 _|n Ba Sr Ra Tg Pt _ Al _]; rewrite Ba; [exact Logic.I|rewrite Sr; exact Logic.I| |].
      * rewrite Sr. cbn [h_kind]. rewrite <- (Ec Ba), Tg. exact Logic.I.
      * rewrite Sr. cbn [h_kind]. rewrite <- (Ec Ba), Tg. split; [exact Ln|]. split.
         -- rewrite (agree_budget _ _ _ _ _ _ E Pt). simpl. rewrite agreed_budgets_app, app_nth2 by lia. rewrite B1, Rt, Nat.sub_diag. reflexivity.
         -- rewrite Rt, in_force_app by lia. rewrite Al. unfold align_at.
            destruct (has_steps _ _) eqn:Hs; [|constructor]. apply aligned_keeps; [exact H|].
            destruct (k_offer _ _ _ _ _ _ K Ph) as [o [Po O]].
            destruct (of_ready _ _ _ _ O (Ad Ra o Po)) as [_ [_ [-> _]]]. unfold groups_at. rewrite Hs, B2. apply formed, H.
    + destruct Kk as [Kk _]. rewrite Kk in IH1. destruct IH1 as [B1 [B2 B3]]. destruct (count_cases _ _ _ _ _ E) as [_ [Al [_ [_ [_ New]]]]].
      destruct (New (k_plan _ _ _ _ _ _ K Ph)) as [new [S2 [S3 [_ S4]]]].
      destruct (count_budget _ _ _ _ _ E) as [Bt Rt].
      unfold h_step. rewrite Kk. assert (Eb : agreed_budgets (rs ++ [Counted cs]) = agreed_budgets rs) by (rewrite agreed_budgets_app; apply app_nil_r).
      split.
      * cbn [h_kind]. rewrite Eb, Rt. split; [exact B1|]. rewrite in_force_app by lia. rewrite Bt. exact B2.
      * rewrite S2. apply Forall_app. split; [apply older_steps, IH2|].
         assert (G : Forall (keeps (in_force (cfg i) i rs (round (rank_of s i)))) (map s_group new)) by (rewrite S3; apply Forall_firstn, B3).
         rewrite Forall_map in G. rewrite Forall_forall in *. intros x Hx. rewrite (S4 x Hx), Eb. split; [lia|]. rewrite in_force_app by lia. exact (G x Hx).
    + destruct (failure_of ps) as [o|] eqn:Fo; [|discriminate]. injection E as <-. unfold h_step. rewrite Kk, Fo. split; [exact Logic.I|].
      rewrite drain_steps. apply older_steps, IH2.
  - intros s r n la R H D IH. exact IH.
Qed.

Theorem every_batch_keeps_what_grouping_gives_under_the_budget_in_force : forall s r, reachable s -> r < W ->
  Forall (fun x => keeps (in_force (cfg r) r (results s) (s_round x)) (s_group x)) (steps_of (rank_of s r)).
Proof.
  intros s r R H. destruct (every_rank_is_bounded s r R H) as [_ F]. eapply Forall_impl; [|exact F]. intros x [L K].
  rewrite <- (firstn_skipn (got s r) (results s)). fold (seen s r). rewrite in_force_app by lia. exact K.
Qed.

End Budgets.

(** ** The agreed budget *)

Section Agreed.
Variables (W : nat) (cfg : nat -> config) (depth : nat -> nat) (input : nat -> list sample).
Hypothesis ok : setting_ok W cfg.
Notation reachable := (System.reachable W cfg depth input).

Definition agreed_on (s : sys) : Prop := let h := whole cfg s in let bs := agreed_budgets (results s) in
  match h_kind h with NOffer => length bs = h_round h | NCount _ => length bs = S (h_round h) | _ => length bs <= S (h_round h) end /\
  h_round h <= length bs /\
  forall j, j < h_round h \/ (j = h_round h /\ exists t, h_kind h = NCount t) -> nth j bs None = least_accepted (cfg 0) W j.

Lemma every_agreement_is_on_the_least : forall s, reachable s -> agreed_on s.
Proof.
  induction 1 as [|s l t R IH St].
  - split; [reflexivity|]. split; [simpl; lia|]. simpl. intros j [L|[_ [t E]]]; [lia|discriminate].
  - pose proof (invariant_of W cfg depth input ok s R) as I.
    destruct St as [s i e t Hi M E|s x P Rd|s i Hi Ru Tk|s d m la Hd Dr]; [exact IH| |exact IH..].
    pose proof (exchange_entry W cfg depth input s x I P Rd) as En. pose proof (exchange_kind W cfg depth input ok s x I P Rd) as Hk.
    unfold agreed_on in *. rewrite (whole_snoc cfg). unfold results in *. cbn [log]. rewrite map_app, agreed_budgets_app. cbn [map snd]. fold (results s) in *.
    set (h := whole cfg s) in *. set (bs := agreed_budgets (results s)) in *. destruct IH as [B1 [B3 B2]].
    assert (Old : forall j y, j < length bs -> nth j (bs ++ y) None = nth j bs None) by (intros j y L; apply app_nth1, L).
    unfold h_step. rewrite Hk in *. destruct x as [a|cs|rs].
    + change (agreed_budgets [Agreed a]) with [o_budget a]. rewrite app_length. cbn [length].
      destruct (is_bad a) eqn:Ba; [|destruct (o_stop_rank a)];
        try (cbn [h_kind h_round]; split; [lia|]; split; [lia|]; intros j [L|[_ [t E]]]; [rewrite Old by lia; apply B2; auto|discriminate]).
      cbn [h_kind h_round]. split; [destruct (target (cfg 0) a); lia|]. split; [lia|]. intros j [L|[-> _]]; [rewrite Old by lia; apply B2; auto|].
      rewrite app_nth2 by lia. rewrite B1, Nat.sub_diag. cbn [nth]. destruct (reduce_budgets _ _ Rd) as [os [Eo ->]]. unfold least_accepted. f_equal.
      apply (f_equal (map (fun m => match m with MOffer o => o_budget o | _ => None end))) in Eo. rewrite map_map in Eo. etransitivity; [symmetry; exact Eo|].
      unfold messages. rewrite map_map. apply map_ext_in. intros q Iq. apply in_seq in Iq. assert (H : q < W) by lia.
      destruct (pending_offers W cfg depth input s a I P Rd) as [all [_ [_ [X _]]]]. destruct (X q H) as [o [_ [_ [Po O]]]]. unfold message. rewrite Po.
      pose proof (g_core _ _ _ _ _ I q H) as K. rewrite (proj1 (pending_current W cfg depth input s q I H (P q H))) in K. fold h in K.
      rewrite (of_budget _ _ _ _ O), (k_round _ _ _ _ _ _ K), (good_agreement W cfg (some_rank _ _ ok) (prints_differ _ _ ok) _ a q En Ba H). reflexivity.
    + change (agreed_budgets [Counted cs]) with (@nil (option nat)). rewrite app_nil_r. cbn [h_kind h_round]. split; [exact B1|]. split; [lia|].
      intros j [L|[_ [u E]]]; [apply B2|discriminate]. destruct (Nat.eq_dec j (h_round h)) as [->|NE]; [right; split; [reflexivity|eauto]|left; lia].
    + change (agreed_budgets [Reported rs]) with (@nil (option nat)). rewrite app_nil_r.
      destruct (failure_of rs); cbn [h_kind h_round]; rewrite ?Hk; (split; [exact B1|]; split; [exact B3|]);
        (intros j [L|[_ [u E]]]; [apply B2; auto|discriminate]).
Qed.

Theorem the_budget_in_force_is_the_least_that_any_rank_accepted_the_round_before : forall s r x k, reachable s -> r < W ->
  In x (steps_of (rank_of s r)) -> s_round x = S k -> in_force (cfg r) r (results s) (S k) = least_accepted (cfg 0) W k.
Proof.
  intros s r x k R H Ix Ex. destruct (every_agreement_is_on_the_least s R) as [B1 [B3 B2]]. simpl. apply B2.
  assert (T : forall gs : list group, Forall (fun _ => True) gs) by (intros gs; apply Forall_forall; auto).
  destruct (every_rank_is_bounded W cfg depth input ok (fun _ _ => True) (fun _ _ _ _ => T _) (fun _ _ _ _ _ _ _ _ => T _) s r R H) as [_ F].
  rewrite Forall_forall in F. destruct (F x Ix) as [L _]. left.
  assert (Le : length (agreed_budgets (seen s r)) <= length (agreed_budgets (results s))).
  { rewrite <- (firstn_skipn (got s r) (results s)). rewrite agreed_budgets_app, app_length. unfold seen. lia. }
  destruct (h_kind (whole cfg s)); lia.
Qed.

End Agreed.
