(** Jobs with shared shards: their books, and what follows for the job. *)
Require Import List Arith Lia Bool Permutation.
From ODB Require Import Lists Types Alignment Machine Local Rank System Facts Keeps Protocol Ending Coupled Termination Age Loss Prompt Shards Drawing.
Import ListNotations.

Section Job.
Variables (W total : nat) (cfg : nat -> config) (depth : nat -> nat) (order : nat -> sample).
Variable deal : nat -> (nat -> nat) -> nat -> nat -> list nat.
Variable wish : nat -> nat -> nat -> list sample -> list sample -> nat.
Hypothesis ok : setting_ok W cfg.
Hypothesis deal_next : forall k ws d, exists n, n <= total - d /\ Permutation (dealt_out W deal k ws d) (seq d n).

Notation shared_path := (shared_path W total cfg depth order deal wish).
Notation shared_run := (shared_run W total cfg depth order deal wish).
Notation shared_reachable := (shared_reachable W total cfg depth order deal wish).
Notation own := (shared_config cfg deal).
Notation content := (content order).
Notation share_of := (share_of deal).
Notation far_of := (far_of W deal).
Notation first_wants := (first_wants cfg).
Notation drawn := (Shards.drawn W deal).
Notation drawn_by := (Shards.drawn_by W deal).
Notation step pl := (System.step W own depth (fun q => content (pl q))).

(** ** Inputs *)

Lemma content_from_app : forall a b q, content_from order q (a ++ b) = content_from order q a ++ content_from order (q + length a) b.
Proof. induction a as [|p a IH]; intros b q; simpl; [rewrite Nat.add_0_r; reflexivity|]. rewrite IH. do 2 f_equal. f_equal. lia. Qed.

Lemma content_from_length : forall a q, length (content_from order q a) = length a.
Proof. induction a as [|p a IH]; intros q; simpl; [reflexivity|]. rewrite IH. reflexivity. Qed.

Lemma content_is_numbered : forall l q i x, nth_error (content_from order q l) i = Some x -> pos x = q + i.
Proof. induction l as [|a l IH]; intros q [|i] x E; simpl in E; try discriminate; [injection E as <-; simpl; lia|]. apply IH in E. lia. Qed.

Lemma content_length : forall a, length (content a) = length a.
Proof. intros a. apply content_from_length. Qed.

Lemma firstn_of_more : forall (A : Type) k n (a b : list A), n + k <= length a -> firstn k (skipn n (a ++ b)) = firstn k (skipn n a).
Proof.
  intros A k n a b L. rewrite skipn_app, firstn_app. replace (k - length (skipn n a)) with 0 by (rewrite skipn_length; lia).
  replace (n - length a) with 0 by lia. simpl. apply app_nil_r.
Qed.

Lemma own_ok : setting_ok W own.
Proof.
  destruct ok as [Sr Co Pd]. constructor; [exact Sr| |].
  - intros r H. destruct (Co r H). constructor; auto. intros q k Hs. simpl. unfold first_windows. change (has_steps (own r) k) with (has_steps (cfg r) k) in Hs. rewrite Hs. exact (Nat.le_max_l 1 _).
  - intros r q Hr Hq E. unfold shared_config. rewrite (Pd r q Hr Hq E). reflexivity.
Qed.

Lemma own_begins_by_reading : forall r, has_steps (cfg r) 0 = true -> at_phase (initial (own r) r) = FILL /\ wanted (initial (own r) r) = Nat.max 1 (length (deal 0 first_wants 0 r)).
Proof.
  intros r Hs. assert (W0 : c_window (own r) r 0 = Nat.max 1 (length (deal 0 first_wants 0 r))) by (simpl; unfold first_windows; rewrite Hs; reflexivity).
  split; [apply initial_reads; rewrite W0; lia|exact W0].
Qed.

Hypothesis deal_first : begins_by_drawing W total cfg deal.

(** ** What each rank has been told and has drawn *)

Definition of_counts (x : option (nat -> nat)) : list (nat -> nat) := match x with Some w => [w] | None => [] end.
Definition heard (s : shared_sys) (r : nat) : list (nat -> nat) := flat_map of_counts (firstn (got (base s) r) (told s)).
Definition rounds_of (s : shared_sys) (r : nat) : list (nat -> nat) := rev (heard s r) ++ [first_wants].

Record book (s : shared_sys) (r : nat) : Prop := {
  b_fresh : begun s r = false -> has_steps (cfg r) 0 = true /\ (rank_of (base s) r = initial (own r) r \/ exists peer cause, rank_of (base s) r = lose peer cause (initial (own r) r)) /\
    got (base s) r = 0 /\ places s r = [] /\ upto s r = 0 /\ pending (base s) r = false;
  b_places : begun s r = true -> places s r = drawn_by r (rounds_of s r);
  b_upto : begun s r = true -> upto s r = drawn (rounds_of s r);
  b_ended : begun s r = true -> ended (rank_of (base s) r) = (upto s r =? total);
  b_round : begun s r = true -> length (heard s r) = round (rank_of (base s) r);
  b_read : begun s r = true -> read (rank_of (base s) r) + wanted (rank_of (base s) r) = length (places s r);
  b_want : at_phase (rank_of (base s) r) = COUNT -> wanted (rank_of (base s) r) = 0 /\ (ended (rank_of (base s) r) = false ->
    ((forall k d w, 1 <= wish r k d w []) -> window (rank_of (base s) r) = [] -> 1 <= wants s r) /\
    (forall ws, nth_error (told s) (got (base s) r) = Some (Some ws) -> ws r = wants s r)) }.

Definition is_counted (x : result) : bool := match x with Counted _ => true | _ => false end.

Record books (s : shared_sys) : Prop := {
  b_rank : forall r, r < W -> book s r;
  b_told : Forall2 (fun x w => is_counted x = is_some w) (results (base s)) (told s) }.

(** An input that begins with what each rank has drawn, and holds nothing more once the rank knows that this is all. *)
Definition extends (input : nat -> list sample) (s : shared_sys) : Prop :=
  forall r, r < W -> exists ext, input r = content (places s r ++ ext) /\ (begun s r = true -> ended (rank_of (base s) r) = true -> ext = []).

Lemma content_of_places : forall s, extends (fun r => content (places s r)) s.
Proof. intros s r Hr. exists []. rewrite app_nil_r. auto. Qed.

(** A step that is possible with one input is possible with a longer one. *)
Definition tells_the_end (l : label) (r : nat) : Prop := match l with LRank i (SamplesRead _ true _) | LDrawn i _ true => i = r | _ => False end.

Lemma step_of_more : forall pl input s l b, step pl s l b ->
  (forall r, r < W -> exists ext, input r = content (pl r ++ ext) /\ (tells_the_end l r -> ext = [])) -> System.step W own depth input s l b.
Proof.
  intros pl input s l b St X. destruct St as [s r e t H M E|s x P R|s r H Ru Tk|s r n la H D]; [|apply StepExchange; assumption|apply StepTrained; assumption|];
    destruct (X r H) as [ext [Ei En]]; unfold Drawing.content in Ei; rewrite content_from_app in Ei;
    pose proof (f_equal (@length sample) Ei) as Li; rewrite app_length, !content_from_length in Li.
  - apply StepRank; [exact H| |exact E]. destruct e as [xs en full| | | | | |]; try exact M. simpl in M |- *. destruct M as [M1 [M2 [M3 M4]]]. split; [|split; [|auto]].
    + pose proof (f_equal (@length sample) M1) as L. rewrite firstn_length, skipn_length, content_length in L.
      destruct (Nat.eq_dec (length xs) 0) as [Z|Z]; [apply length_zero_iff_nil in Z; rewrite Z; reflexivity|].
      unfold Drawing.content in *. rewrite Ei, firstn_of_more by (rewrite content_from_length; lia). exact M1.
    + intros Et. subst en. specialize (M2 eq_refl). rewrite content_length in M2. rewrite (En eq_refl) in Li. simpl in Li. lia.
  - apply StepDrawn; [exact H|]. destruct D as [D1 [D2 [D3 [D4 D5]]]]. rewrite content_length in D3, D4. repeat (split; [try assumption; lia|]). split; [|exact D5].
    intros Et. subst la. specialize (D4 eq_refl). rewrite (En eq_refl) in Li. simpl in Li. lia.
Qed.

(** ** What a rank's events do to its reading *)

Lemma own_event_reads : forall c r d u e t, (forall x, e <> Got x) -> (forall xs en full, e = SamplesRead xs en full -> en = false /\ full = false) ->
  transition c r d u e = Some t ->
  ended t = ended u /\ read t + wanted t = read u + wanted u /\ round t = round u /\
  (at_phase t = COUNT -> at_phase u = COUNT /\ (wanted u = 0 -> wanted t = 0 /\ window t = window u)).
Proof.
  intros c r d u e t NG NR E. pose proof (transition_same _ _ _ _ _ _ NG E) as Sm. destruct (own_event _ _ _ _ _ _ NG E) as [[G ->]|[-> _]]; [|repeat split; auto].
  assert (Ph : at_phase (post c r (moved d u e)) = COUNT -> at_phase u = COUNT).
  { intros P. destruct (post_phase c r (moved d u e)) as [X|[_ X]]; rewrite X in P; [|discriminate]. destruct (moved_phase d u e) as [Y|[_ Y]]; congruence. }
  destruct e as [xs en full| |x| | |cause|]; try (do 3 (split; [reflexivity|]); intros P; split; [exact (Ph P)|intros Z; destruct (sa_window _ _ Sm Z); auto]; fail).
  destruct (NR xs en full eq_refl) as [-> ->]. destruct G as [Wa [Lx _]]. simpl. split; [apply orb_false_r|]. split; [lia|]. split; [reflexivity|]. intros P. split; [exact (Ph P)|contradiction].
Qed.

(** For results other than counts: a rank that shares an order asks for nothing once it has agreed. *)
Lemma answer_reads : forall c r d u x t, c_shares c = true -> is_counted x = false -> (forall a, x = Agreed a -> at_phase u = OFFER -> o_ready a = true -> wanted u = 0) ->
  transition c r d u (Got x) = Some t ->
  ended t = ended u /\ read t + wanted t = read u + wanted u /\ round t = round u /\ (at_phase t = COUNT -> at_phase u = OFFER /\ wanted t = 0 /\ exists a, x = Agreed a).
Proof.
  intros c r d u x t Sh Nc Rd E. pose proof (nothing_is_read_of_an_answer _ _ _ _ _ _ E) as Re. simpl in E. destruct x as [a|cs|rs]; destruct (at_phase u) eqn:Ph; try discriminate.
  - destruct (agree_cases _ _ _ _ _ _ E) as [C _]. destruct (held_agree _ _ _ _ _ _ E) as [[P He]|[P He]]; unfold held in He; [injection He as _ Hn Hd Hr|injection He as Hn Hd Hr].
    + rewrite Hn, Hd, Hr, Re. repeat split; intros; contradiction.
    + rewrite Sh, orb_true_r in Hn. destruct C as [_ Q _ _|? _ _ [Q|Q] _|_ _ _ _ [Q|Q] _|n _ _ Ra _ _ _ _ _]; try congruence. rewrite Hn, Hd, Hr, Re, (Rd a eq_refl eq_refl Ra). repeat split. eauto.
  - destruct (failure_of rs); [|discriminate]. injection E as <-. match goal with |- context[drain ?d ?o ?l ?v] => pose proof (drain_phase d o l v) as D end.
    repeat split; destruct D; congruence.
Qed.

Lemma count_reads : forall c r d u cs t, transition c r d u (Got (Counted cs)) = Some t ->
  at_phase u = COUNT /\ ended t = ended u /\ read t = read u /\ wanted t = wanted u /\ round t = S (round u) /\ at_phase t <> COUNT.
Proof.
  intros c r d u cs t E. pose proof (nothing_is_read_of_an_answer _ _ _ _ _ _ E) as Re. simpl in E. destruct (at_phase u) eqn:Ph; try discriminate.
  pose proof (held_count _ _ _ _ _ E) as He. cbv zeta in He. unfold held in He. injection He as _ Hn Hd Hr. destruct (count_cases _ _ _ _ _ E) as [_ [_ [_ [_ [P _]]]]].
  repeat split; auto. destruct P; congruence.
Qed.

(** What a rank knows once it has begun, or has drawn with the sums. *)
Lemma begins_reads : forall s r mine la b, begins W cfg depth order deal s r mine la b -> r < W -> book s r -> begun s r = false ->
  mine = deal 0 first_wants 0 r -> (mine <> [] \/ la = true) ->
  got b = got (base s) /\ log b = log (base s) /\ (forall q, q <> r -> rank_of b q = rank_of (base s) q /\ pending b q = pending (base s) q) /\
  let u := rank_of b r in ended u = la /\ read u + wanted u = length mine /\ round u = 0 /\ at_phase u <> COUNT.
Proof.
  intros s r mine la b B H Bk Bg Em Some. destruct (b_fresh _ _ Bk Bg) as [Hs [Fr _]]. unfold begins in B.
  assert (I : ended (rank_of (base s) r) = false /\ read (rank_of (base s) r) = 0 /\ wanted (rank_of (base s) r) = Nat.max 1 (length mine) /\ round (rank_of (base s) r) = 0 /\ at_phase (rank_of (base s) r) <> COUNT)
    by (subst mine; destruct (own_begins_by_reading r Hs) as [Pi Wi]; destruct Fr as [->|[peer [cause ->]]]; repeat split; try discriminate; try exact Wi; unfold lose, is_ending; rewrite Pi; try reflexivity; try exact Wi; discriminate).
  destruct I as [I1 [I2 [I3 [I4 I5]]]]. destruct la.
  2:{ subst b. do 3 (split; [auto|]). cbv zeta. rewrite I1, I2, I3, I4. repeat split; [|exact I5]. destruct mine; [destruct Some; congruence|simpl; lia]. }
  destruct mine as [|p mine]; inversion B as [? ? ? t H' M E| | |? ? ? ? H' D]; subst; simpl.
  - assert (NG : forall x, SamplesRead [] true false <> Got x) by discriminate.
    destruct (own_event _ _ _ _ _ _ NG E) as [[G ->]|[_ D]]; [|discriminate]. repeat (split; [reflexivity|]). split.
    + intros q Nq. rewrite !update_other by exact Nq. split; [reflexivity|]. destruct (has_posted _ _); [apply update_other, Nq|reflexivity].
    + rewrite update_same. assert (Pc : at_phase (post (own r) r (moved (depth r) (rank_of (base s) r) (SamplesRead [] true false))) <> COUNT).
      { destruct (post_phase (own r) r (moved (depth r) (rank_of (base s) r) (SamplesRead [] true false))) as [-> |[_ ->]]; [exact I5|discriminate]. }
      split; [apply orb_true_r|]. split; [simpl; lia|]. split; [exact I4|exact Pc].
  - repeat (split; [reflexivity|]). split.
    + intros q Nq. split; [|reflexivity]. exact (drawn_other (base s) r (S (length mine)) true q Nq).
    + rewrite Nat.eqb_refl. rewrite I2, I4. repeat split; auto.
Qed.

Lemma draws_reads : forall s r mine la b, draws_its_share W cfg depth order deal s r mine la b -> ended (rank_of (base s) r) = false \/ mine = [] /\ la = true ->
  wanted (rank_of (base s) r) = 0 -> read (rank_of (base s) r) = length (places s r) ->
  got b = got (base s) /\ log b = log (base s) /\ (forall q, q <> r -> rank_of b q = rank_of (base s) q) /\ pending b = pending (base s) /\
  let u := rank_of b r in ended u = la /\ wanted u = length mine /\ read u = read (rank_of (base s) r) /\ round u = round (rank_of (base s) r).
Proof.
  intros s r mine la b D En Wa Rd. unfold draws_its_share in D. destruct (ended (rank_of (base s) r) || is_nil mine && negb la) eqn:Sk.
  - subst b. do 4 (split; [auto|]). cbv zeta. rewrite Wa. destruct En as [En|[-> ->]]; [|rewrite orb_false_r in Sk; repeat split; auto]. rewrite En in *. simpl in Sk.
    destruct mine; [|discriminate]. destruct la; [discriminate|]. repeat split; auto.
  - inversion D; subst. do 2 (split; [reflexivity|]). split; [intros q Nq; apply drawn_other, Nq|]. split; [reflexivity|]. cbv zeta. rewrite drawn_same. repeat split.
Qed.

(** ** The books are kept *)

Lemma Forall2_nth : forall (A B : Type) (P : A -> B -> Prop) l k, Forall2 P l k -> forall n x, nth_error l n = Some x -> exists y, nth_error k n = Some y /\ P x y.
Proof. induction 1 as [|x y l k H F IH]; intros [|n] z E; simpl in *; try discriminate; [injection E as <-; eauto|apply IH, E]. Qed.

Lemma Forall2_same_length : forall (A B : Type) (P : A -> B -> Prop) l k, Forall2 P l k -> length l = length k.
Proof. induction 1 as [|x y l k H F IH]; simpl; [reflexivity|]. rewrite IH. reflexivity. Qed.

Lemma told_length : forall s, books s -> length (told s) = length (log (base s)).
Proof. intros s B. rewrite <- (Forall2_same_length _ _ _ _ _ (b_told _ B)). unfold results. apply map_length. Qed.

Lemma book_same : forall s s' q, begun s' q = begun s q -> rank_of (base s') q = rank_of (base s) q -> got (base s') q = got (base s) q ->
  places s' q = places s q -> upto s' q = upto s q -> wants s' q = wants s q -> (begun s q = false -> pending (base s') q = pending (base s) q) -> told s' = told s -> book s q -> book s' q.
Proof.
  intros s s' q E1 E2 E3 E4 E5 E6 E7 E8 B. destruct B. constructor; unfold rounds_of, heard in *; rewrite ?E1, ?E2, ?E3, ?E4, ?E5, ?E6, ?E8; auto.
  intros H. rewrite (E7 H). auto.
Qed.

(** The book of a rank that has moved but drawn nothing. *)
Lemma book_moved : forall s s' r, begun s' r = begun s r -> places s' r = places s r -> upto s' r = upto s r -> heard s' r = heard s r ->
  let u := rank_of (base s) r in let t := rank_of (base s') r in
  ended t = ended u -> round t = round u -> read t + wanted t = read u + wanted u ->
  (begun s r = false -> (t = initial (own r) r \/ exists peer cause, t = lose peer cause (initial (own r) r)) /\ got (base s') r = 0 /\ pending (base s') r = false) ->
  (at_phase t = COUNT -> wanted t = 0 /\ (ended u = false -> ((forall k d w, 1 <= wish r k d w []) -> window t = [] -> 1 <= wants s' r) /\
    (forall ws, nth_error (told s') (got (base s') r) = Some (Some ws) -> ws r = wants s' r))) -> book s r -> book s' r.
Proof.
  intros s s' r E1 E2 E3 E4 u t E5 E6 E7 F C B. destruct B. constructor; unfold rounds_of in *; rewrite ?E1, ?E2, ?E3, ?E4; fold t; rewrite ?E5, ?E6, ?E7; auto.
  intros H. destruct (F H) as [F1 [F2 F3]], (b_fresh0 H) as [Hs [_ [_ [F4 [F5 _]]]]]. auto 10.
Qed.

Lemma heard_more : forall s s' r x, nth_error (told s) (got (base s) r) = Some x -> told s' = told s -> got (base s') r = S (got (base s) r) ->
  heard s' r = heard s r ++ of_counts x.
Proof. intros s s' r x E T G. unfold heard. rewrite T, G, (firstn_snoc _ _ _ _ E), flat_map_app. simpl. rewrite app_nil_r. reflexivity. Qed.

Definition beginners (s : shared_sys) : nat := length (filter (begun s) (seq 0 W)).

Lemma beginners_within : forall s, beginners s <= W.
Proof.
  intros s. unfold beginners. rewrite <- (seq_length W 0) at 2. induction (seq 0 W) as [|q l IH]; simpl; [lia|]. destruct (begun s q); simpl; lia.
Qed.

Lemma one_more_begins : forall f r, r < W -> f r = false -> length (filter (update f r true) (seq 0 W)) = S (length (filter f (seq 0 W))).
Proof.
  intros f r Hr E. assert (X : In r (seq 0 W)) by (apply in_seq; lia). pose proof (seq_NoDup W 0) as Nn. revert X Nn. generalize (seq 0 W).
  induction l as [|q l IH]; intros X Nn; [destruct X|]. inversion Nn as [|? ? Nq Nn']; subst. simpl. destruct (Nat.eq_dec q r) as [->|D].
  - rewrite update_same, E. simpl. f_equal. clear - Nq. induction l as [|z l IH]; [reflexivity|]. simpl in *.
    rewrite update_other by (intros ->; tauto). destruct (f z); simpl; rewrite IH by tauto; reflexivity.
  - rewrite update_other by exact D. destruct X as [X|X]; [contradiction|]. specialize (IH X Nn'). destruct (f q); simpl; rewrite IH; reflexivity.
Qed.

(** With such an input, the system of System.v can follow the job from [s] to [b], in at least [k] counted transitions. *)
Definition does (input : nat -> list sample) (k : nat) (s b : sys) : Prop :=
  forall u m, lossy_path W own depth input u m s -> exists m', m + k <= m' /\ lossy_path W own depth input u m' b.

Lemma does_nothing : forall input s, does input 0 s s.
Proof. intros input s u m P. exists m. split; [lia|exact P]. Qed.

Lemma does_a_step : forall input s l b k t, System.step W own depth input s l b -> does input k b t -> does input (if is_draw l then k else S k) s t.
Proof.
  intros input s l b k t St D u m P. destruct (is_draw l) eqn:Dr.
  - exact (D u m (lossy_draw _ _ _ _ _ _ _ _ l P St Dr)).
  - destruct (D u (S m) (lossy_on _ _ _ _ _ _ _ _ P (LossyStep _ _ _ _ _ l _ St Dr))) as [m' [L P']]. exists m'. split; [lia|exact P'].
Qed.

Definition kept (s s' : shared_sys) : Prop :=
  books s' /\ forall input, extends input s' -> extends input s /\ exists k, S (beginners s) <= beginners s' + k /\ does input k (base s) (base s').

Lemma beginning_is_kept : forall s r b, books s -> r < W -> begun s r = false ->
  let mine := share_of s r 0 first_wants in let far := far_of s r 0 first_wants in
  begins W cfg depth order deal s r mine (far =? total) b ->
  kept s (mkShared b (update (begun s) r true) (update (places s) r mine) (update (upto s) r far) (wants s) (told s)).
Proof.
  intros s r b [Br Bt] Hr Bg mine far B. destruct (b_fresh _ _ (Br r Hr) Bg) as [Hs0 [_ [G0 [Pl0 [Up0 _]]]]].
  assert (Em : mine = deal 0 first_wants 0 r) by (unfold mine, Drawing.share_of; rewrite Up0; reflexivity).
  assert (Some : mine <> [] \/ (far =? total) = true).
  { pose proof (dealt_within W total deal deal_next 0 first_wants 0). destruct deal_first as [[H0 Fd]|[H0 _]]; [|rewrite (H0 r Hr) in Hs0; discriminate].
    destruct (Fd first_wants r Hr (ok_window _ (configs_ok _ _ ok 0 ltac:(lia)) 0 0 (H0 0 ltac:(lia)))) as [L|L].
    - left. rewrite Em. destruct (deal 0 first_wants 0 r); [simpl in L; lia|discriminate].
    - right. apply Nat.eqb_eq. unfold far, Drawing.far_of. rewrite Up0. lia. }
  destruct (begins_reads s r mine _ b B Hr (Br r Hr) Bg Em Some) as [Gb [Lb [Ot [A1 [A2 [A3 A4]]]]]]. split.
  - constructor; [|unfold results; cbn [base told]; rewrite Lb; exact Bt]. intros q Hq. destruct (Nat.eq_dec q r) as [->|Nq].
    + constructor; cbn [begun base places upto wants told]; unfold rounds_of, heard; cbn [base told]; rewrite ?update_same, ?Gb, ?G0; simpl firstn; intros.
      * discriminate.
      * simpl. rewrite Em. reflexivity.
      * simpl. unfold far, Drawing.far_of. rewrite Up0. reflexivity.
      * exact A1.
      * simpl. symmetry. exact A3.
      * exact A2.
      * contradiction.
    + destruct (Ot q Nq) as [O1 O2]. apply (book_same s); cbn [begun base places upto wants told]; rewrite ?update_other by exact Nq; auto. rewrite Gb. reflexivity.
  - intros input X. split.
    + intros q Hq. destruct (X q Hq) as [ext [E1 E2]]. cbn [begun base places] in E1, E2. destruct (Nat.eq_dec q r) as [->|Nq].
      * rewrite update_same in E1. exists (mine ++ ext). rewrite Pl0. split; [exact E1|congruence].
      * rewrite !update_other in * by exact Nq. destruct (Ot q Nq) as [O1 _]. rewrite O1 in E2. eauto.
    + exists 0. unfold beginners. cbn [begun base]. rewrite one_more_begins by assumption. split; [lia|]. unfold begins in B.
      destruct (far =? total) eqn:La; [|subst b; apply does_nothing].
      assert (St : exists l, System.step W own depth input (base s) l b).
      { eexists. eapply step_of_more; [exact B|]. intros q Hq. destruct (X q Hq) as [ext [E1 E2]]. cbn [begun base places] in E1, E2. exists ext. split; [exact E1|].
        intros T. apply E2; assert (q = r) as -> by (destruct mine; simpl in T; auto); [apply update_same|exact A1]. }
      destruct St as [l St]. intros u m P. destruct (does_a_step _ _ _ _ 0 _ St (does_nothing _ _) u m P) as [m' [L P']]. exists m'. split; [lia|exact P'].
Qed.

Lemma counting_is_kept : forall s r cs ws b t, books s -> r < W -> begun s r = true -> nth_error (told s) (got (base s) r) = Some (Some ws) ->
  let next := S (round (rank_of (base s) r)) in let mine := share_of s r next ws in let far := far_of s r next ws in
  draws_its_share W cfg depth order deal s r mine (far =? total) b -> step (update (places s) r (places s r ++ mine)) b (LRank r (Got (Counted cs))) t ->
  kept s (mkShared t (begun s) (update (places s) r (places s r ++ mine)) (update (upto s) r far) (wants s) (told s)).
Proof.
  intros s r cs ws b t [Br Bt] Hr Bg To next mine far D St. pose proof (Br r Hr) as Bk. inversion St as [? ? ? u H' M E| | |]; subst. clear H'.
  destruct (count_reads _ _ _ _ _ _ E) as [Pb [C1 [C2 [C3 [C4 C5]]]]].
  assert (Pv : at_phase (rank_of (base s) r) = COUNT).
  { unfold draws_its_share in D. destruct (_ || _); [subst b; exact Pb|]. inversion D; subst. rewrite drawn_same in Pb. exact Pb. }
  destruct (b_want _ _ Bk Pv) as [Wz _]. pose proof (b_read _ _ Bk Bg) as Rd. rewrite Wz, Nat.add_0_r in Rd. pose proof (b_ended _ _ Bk Bg) as En.
  assert (Ut : upto s r <= total) by (rewrite (b_upto _ _ Bk Bg); apply (no_more_is_drawn_than_there_is W total), deal_next).
  assert (Ended : ended (rank_of (base s) r) = true -> mine = [] /\ (far =? total) = true).
  { intros Ev. rewrite Ev in En. symmetry in En. apply Nat.eqb_eq in En. pose proof (dealt_within W total deal deal_next next ws (upto s r)).
    pose proof (share_within W deal next ws (upto s r) r Hr). unfold far, Drawing.far_of, mine, Drawing.share_of.
    split; [apply length_zero_iff_nil; lia|apply Nat.eqb_eq; lia]. }
  assert (En' : ended (rank_of (base s) r) = false \/ mine = [] /\ (far =? total) = true) by (destruct (ended (rank_of (base s) r)); auto).
  destruct (draws_reads s r mine _ b D En' Wz Rd) as [Gb [Lb [Ot [Pe [D1 [D2 [D3 D4]]]]]]].
  match goal with |- kept _ ?x => set (s' := x) end.
  assert (Gr : got (base s') r = S (got (base s) r)) by (unfold s'; cbn [base got]; rewrite update_same, Gb; reflexivity).
  assert (Ru : rank_of (base s') r = u) by (unfold s'; cbn [base rank_of]; apply update_same).
  assert (Rq : forall q, q <> r -> rank_of (base s') q = rank_of (base s) q) by (intros q Nq; unfold s'; cbn [base rank_of]; rewrite update_other by exact Nq; apply Ot, Nq).
  split.
  - constructor; [|unfold results, s'; cbn [base told log]; rewrite Lb; exact Bt]. intros q Hq. destruct (Nat.eq_dec q r) as [->|Nq].
    + assert (Hd : heard s' r = heard s r ++ [ws]) by (apply (heard_more s s' r (Some ws) To); [reflexivity|exact Gr]).
      assert (Rs : rounds_of s' r = ws :: rounds_of s r) by (unfold rounds_of; rewrite Hd, rev_app_distr; reflexivity).
      assert (Ln : length (rounds_of s r) = next) by (unfold rounds_of; rewrite app_length, rev_length, (b_round _ _ Bk Bg); simpl; apply Nat.add_1_r).
      constructor; rewrite ?Rs, ?Hd, ?Ru; unfold s'; cbn [begun places upto]; rewrite ?update_same; intros H.
      * congruence.
      * cbn [Shards.drawn_by]. rewrite <- (b_places _ _ Bk H), <- (b_upto _ _ Bk H), Ln. reflexivity.
      * cbn [Shards.drawn]. rewrite <- (b_upto _ _ Bk H), Ln. reflexivity.
      * rewrite C1. exact D1.
      * rewrite app_length, (b_round _ _ Bk H), C4, D4. simpl. lia.
      * rewrite C2, C3, D2, D3, app_length, Rd. reflexivity.
      * contradiction.
    + apply (book_same s); auto; unfold s'; cbn [begun base places upto wants told got pending]; rewrite ?update_other by exact Nq; auto; [rewrite Gb; reflexivity|].
      intros _. destruct (has_posted _ _); rewrite ?update_other by exact Nq; rewrite Pe; reflexivity.
  - intros input X. split.
    + intros q Hq. destruct (X q Hq) as [ext [E1 E2]]. destruct (Nat.eq_dec q r) as [->|Nq].
      * rewrite Ru in E2. unfold s' in E1, E2. cbn [begun places] in E1, E2. rewrite update_same, <- app_assoc in E1. eexists. split; [exact E1|]. intros B1 B2.
        destruct (Ended B2) as [Z1 Z2]. rewrite Z1. apply E2; [exact B1|]. rewrite C1, D1. exact Z2.
      * rewrite (Rq q Nq) in E2. unfold s' in E1, E2. cbn [begun places] in E1, E2. rewrite update_other in E1 by exact Nq. eauto.
    + exists 1. split; [unfold beginners, s'; cbn [begun]; lia|].
      assert (X' : forall l, (is_draw l = true -> tells_the_end l r -> far = total) -> (forall q, tells_the_end l q -> q = r) -> (is_draw l = false -> forall q, ~ tells_the_end l q) ->
        forall q, q < W -> exists ext, input q = content (update (places s) r (places s r ++ mine) q ++ ext) /\ (tells_the_end l q -> ext = [])).
      { intros l T1 T2 T3 q Hq. destruct (X q Hq) as [ext [E1 E2]]. exists ext. split; [exact E1|]. intros T. destruct (is_draw l) eqn:Dr; [|destruct (T3 eq_refl q T)].
        pose proof (T2 q T) as ->. apply E2; [exact Bg|]. rewrite Ru, C1, D1. apply Nat.eqb_eq, (T1 eq_refl T). }
      assert (Dt : does input 1 b (base s')).
      { refine (does_a_step input b _ (base s') 0 _ (step_of_more _ input _ _ _ St (X' _ _ _ _)) (does_nothing _ _)); simpl; auto; discriminate || tauto. }
      unfold draws_its_share in D. destruct (_ || _); [subst b; exact Dt|].
      refine (does_a_step input (base s) _ b 1 _ (step_of_more _ input _ _ _ D (X' _ _ _ _)) Dt); simpl.
      * intros _. destruct (far =? total) eqn:La; [intros _; apply Nat.eqb_eq, La|intros []].
      * intros q. destruct (far =? total); [auto|intros []].
      * discriminate.
Qed.

Lemma nothing_told : forall s b, log b = log (base s) -> told_after s b = told s.
Proof.
  intros s b E. unfold told_after. replace (nth_error (results b) (length (log (base s)))) with (@None result); [apply app_nil_r|].
  symmetry. apply nth_error_None. unfold results. rewrite map_length, E. apply le_n.
Qed.

Lemma going_on_is_kept : forall s l b, lossy_reachable W own depth (fun q => content (places s q)) (base s) -> books s -> is_of_its_own s l -> step (places s) (base s) l b ->
  kept s (mkShared b (begun s) (places s) (upto s) (wants_after wish s l b) (told_after s b)).
Proof.
  intros s l b Rb B Ow St. set (s' := mkShared _ _ _ _ _ _). pose proof B as [Br Bt].
  assert (Kept : books s' -> (forall r, r < W -> ended (rank_of b r) = ended (rank_of (base s) r)) -> (forall r, ~ tells_the_end l r) -> kept s s').
  { intros Bs Ee Nt. split; [exact Bs|]. intros input X. assert (X0 : extends input s).
    { intros q Hq. destruct (X q Hq) as [ext [E1 E2]]. unfold s' in E1, E2. cbn [begun base places] in E1, E2. rewrite (Ee q Hq) in E2. eauto. }
    split; [exact X0|]. exists 1. split; [unfold beginners, s'; cbn [begun]; lia|].
    assert (St' : System.step W own depth input (base s) l b).
    { eapply step_of_more; [exact St|]. intros q Hq. destruct (X0 q Hq) as [ext [E1 _]]. exists ext. split; [exact E1|]. intros T. destruct (Nt q T). }
    pose proof (does_a_step input _ l b 0 b St' (does_nothing _ _)) as D. destruct (is_draw l) eqn:Dr; [destruct l; try discriminate; destruct Ow|exact D]. }
  inversion St as [? r e t Hr M E|? x P Re|? r Hr Ru Tk|? r n la Hr D]; subst; [| | |destruct Ow].
  - pose proof (Br r Hr) as Bk. set (v := rank_of (base s) r) in *.
    assert (Bg : begun s r = true) by (destruct e as [| |[]| | | |]; simpl in Ow; tauto).
    assert (Nt : told s' = told s) by (apply nothing_told; reflexivity).
    assert (Nc : forall x, e = Got x -> is_counted x = false) by (intros x ->; destruct x; [reflexivity|destruct Ow|reflexivity]).
    assert (Hd : heard s' r = heard s r).
    { destruct (answer_or_own e) as [[x ->]|NG].
      - destruct M as [_ [M2 _]]. destruct (Forall2_nth _ _ _ _ _ Bt _ _ M2) as [w [Hw Ew]]. rewrite (Nc x eq_refl) in Ew. destruct w; [discriminate|].
        rewrite (heard_more s s' r None Hw); [apply app_nil_r|exact Nt|]. unfold s'. cbn [base got]. apply update_same.
      - unfold heard. rewrite Nt. unfold s'. cbn [base got]. destruct e; try reflexivity. edestruct NG. reflexivity. }
    assert (Read : ended t = ended v /\ read t + wanted t = read v + wanted v /\ round t = round v /\
      (at_phase t = COUNT -> wanted t = 0 /\ ((exists a, e = Got (Agreed a) /\ is_lost v = false) \/ (forall x, e <> Got x) /\ at_phase v = COUNT /\ window t = window v))).
    { destruct (answer_or_own e) as [[x ->]|NG].
      - destruct (answer_reads (own r) r (depth r) v x t eq_refl (Nc x eq_refl)) as [R1 [R2 [R3 R4]]]; [|exact E|].
        + intros a -> Ph Ra. exact (a_ready_rank_has_read W own depth _ own_ok (base s) r a Rb Hr M Ph Ra).
        + repeat (split; [assumption|]). intros P. destruct (R4 P) as [P0 [W0 [a ->]]]. split; [exact W0|]. left. exists a. split; [reflexivity|]. unfold is_lost, is_ending. rewrite P0. reflexivity.
      - destruct (own_event_reads (own r) r (depth r) v e t NG) as [R1 [R2 [R3 R4]]]; [intros xs en full ->; simpl in Ow; tauto|exact E|].
        repeat (split; [assumption|]). intros P. destruct (R4 P) as [P0 W0]. destruct (b_want _ _ Bk P0) as [Z _]. destruct (W0 Z). auto. }
    destruct Read as [R1 [R2 [R3 R4]]]. apply Kept.
    + constructor.
      2:{ rewrite Nt. exact Bt. }
      intros q Hq. destruct (Nat.eq_dec q r) as [->|Nq].
      * apply (book_moved s); auto; rewrite ?Nt; unfold s'; cbn [base rank_of got]; rewrite ?update_same; auto; [congruence|]. intros H.
        destruct (R4 H) as [W0 C]. split; [exact W0|]. intros En. fold v in En. destruct C as [[a [-> Lv]]|[NG [Pv Wv]]].
        -- cbn [wants wants_after rank_of]. rewrite !update_same. split; [intros Wi Wn; unfold wish_of; fold v; rewrite En, Wn; apply Wi|]. intros ws Hw.
           destruct M as [M1 [M2 _]]. pose proof (a_live_answer_is_the_last W own depth _ own_ok (base s) r _ Rb Hr Lv M1 M2) as L. rewrite <- (told_length s B) in L.
           assert (Z : nth_error (told s) (S (got (base s) r)) <> None) by congruence. apply nth_error_Some in Z. lia.
        -- destruct (b_want _ _ Bk Pv) as [_ W1]. specialize (W1 En). fold v in W1. rewrite Wv. destruct e; try exact W1. edestruct NG. reflexivity.
      * apply (book_same s); auto; unfold s'; cbn [begun base places upto wants rank_of got pending]; rewrite ?update_other by exact Nq; auto.
        -- destruct e; auto; apply update_other, Nq.
        -- unfold wants_after. destruct e as [| |[a|cs|rs]| | | |]; auto. apply update_other, Nq.
        -- intros _. destruct (has_posted _ _); [apply update_other, Nq|reflexivity].
    + intros q Hq. cbn [rank_of]. destruct (Nat.eq_dec q r) as [->|Nq]; [rewrite update_same; exact R1|rewrite update_other by exact Nq; reflexivity].
    + intros q T. destruct e; try destruct T. simpl in Ow. destruct Ow as [_ [-> _]]. exact T.
  - apply Kept; [|reflexivity|intros r []].
    assert (Gt : forall q, q < W -> got (base s) q = length (told s)) by (intros q Hq; rewrite (told_length s B); exact (all_are_current W own depth _ own_ok (base s) q Rb P Hq)).
    assert (Nt : told s' = told s ++ [if is_counted x then Some (wants s) else None]).
    { unfold s', told_after. cbn [told base]. unfold results. cbn [log]. rewrite map_app, nth_error_app2, map_length, Nat.sub_diag by (rewrite map_length; apply le_n). simpl. destruct x; reflexivity. }
    constructor.
    + intros q Hq. pose proof (Br q Hq) as Bk. assert (Hd : heard s' q = heard s q).
      { unfold heard. rewrite Nt. unfold s'. cbn [base got]. rewrite firstn_app, (Gt q Hq), Nat.sub_diag. simpl. rewrite app_nil_r. reflexivity. }
      apply (book_moved s); auto; rewrite ?Nt; unfold s'; cbn [base rank_of got]; intros H.
      * destruct (b_fresh _ _ Bk H) as [_ [_ [_ [_ [_ Pe]]]]]. rewrite (P q Hq) in Pe. discriminate.
      * destruct (b_want _ _ Bk H) as [W0 W1]. split; [exact W0|]. intros En. destruct (W1 En) as [W2 _]. split; [exact W2|]. intros ws. rewrite (Gt q Hq), nth_error_app2, Nat.sub_diag by lia. simpl.
        destruct (is_counted x); intros Hw; [|discriminate]. injection Hw as <-. reflexivity.
    + rewrite Nt. unfold s', results. cbn [base log]. rewrite map_app. apply Forall2_app; [exact Bt|]. constructor; [|constructor]. simpl. destruct (is_counted x); reflexivity.
  - assert (Nt : told s' = told s) by (apply nothing_told; reflexivity). apply Kept; [|reflexivity|intros q []]. constructor; [|rewrite Nt; exact Bt]. intros q Hq. apply (book_same s); auto.
Qed.

Lemma loss_is_kept : forall s r peer cause, books s -> r < W -> is_ending (rank_of (base s) r) = false ->
  kept s (mkShared (mkSys (update (rank_of (base s)) r (lose peer cause (rank_of (base s) r))) (got (base s)) (pending (base s)) (log (base s)) (running (base s)))
    (begun s) (places s) (upto s) (wants s) (told s)).
Proof.
  intros s r peer cause [Br Bt] Hr En. set (v := rank_of (base s) r) in *.
  assert (L : at_phase (lose peer cause v) = DONE /\ ended (lose peer cause v) = ended v /\ read (lose peer cause v) = read v /\ wanted (lose peer cause v) = wanted v /\ round (lose peer cause v) = round v)
    by (unfold lose; rewrite En; repeat split).
  destruct L as [L1 [L2 [L3 [L4 L5]]]]. split.
  - constructor; [|exact Bt]. intros q Hq. pose proof (Br q Hq) as Bk. destruct (Nat.eq_dec q r) as [->|Nq].
    + apply (book_moved s); auto; cbn [base rank_of got pending told wants]; rewrite ?update_same; auto; [|intros H; congruence].
      intros H. destruct (b_fresh _ _ Bk H) as [_ [F [F2 [_ [_ F3]]]]]. split; [right|auto]. destruct F as [F|[p [c F]]]; [exists peer, cause; unfold v; rewrite F; reflexivity|].
      fold v in F. rewrite F in En. unfold lose in En. rewrite initial_goes_on in En. discriminate.
    + apply (book_same s); cbn [begun base places upto wants told rank_of got pending]; rewrite ?update_other by exact Nq; auto.
  - intros input X. split.
    + intros q Hq. destruct (X q Hq) as [ext [E1 E2]]. cbn [begun base places rank_of] in E1, E2. exists ext. split; [exact E1|]. intros B1 B2. apply E2; [exact B1|].
      destruct (Nat.eq_dec q r) as [->|Nq]; [rewrite update_same, L2; exact B2|rewrite update_other by exact Nq; exact B2].
    + exists 1. split; [unfold beginners; cbn [begun]; lia|]. intros u m P. exists (S m). split; [lia|]. eapply lossy_on; [exact P|]. apply LossyLoss; assumption.
Qed.

(** ** Every run is one of System.v's system, with losses *)

Lemma start_books : books (shared_start cfg deal).
Proof.
  constructor; [|constructor]. intros r Hr. pose proof (initial_phase (own r) r) as Pi.
  constructor; cbn [begun base places upto wants told shared_start start rank_of got pending]; unfold rounds_of, heard; cbn [base start got told shared_start firstn flat_map rev app Shards.drawn Shards.drawn_by length].
  { intros H. apply negb_false_iff in H. split; [exact H|]. split; [left; reflexivity|]. repeat (split; [reflexivity|]). unfold is_waiting. rewrite (proj1 (own_begins_by_reading r H)). reflexivity. }
  6:{ intros P. destruct Pi as [Pi|Pi]; simpl in *; congruence. }
  all: intros H; apply negb_true_iff in H; destruct deal_first as [[H0 _]|[_ [T0 D0]]]; [rewrite (H0 r Hr) in H; discriminate|].
  - rewrite D0. reflexivity.
  - unfold dealt_out. assert (Z : concat (map (deal 0 first_wants 0) (ranks W)) = []) by (induction (ranks W) as [|q l IH]; simpl; [reflexivity|rewrite D0; exact IH]). rewrite Z. reflexivity.
  - simpl. destruct total; [lia|reflexivity].
  - reflexivity.
  - simpl. unfold first_windows. rewrite H. reflexivity.
Qed.

Lemma a_shared_step_is_kept : forall s l s', books s -> lossy_reachable W own depth (fun q => content (places s q)) (base s) ->
  shared_step W total cfg depth order deal wish s l s' -> kept s s'.
Proof.
  intros s l s' B Rb St. destruct St as [s r b Hr Bg mine far Be|s l b Ow St|s r cs ws b t Hr Bg To mine far D St].
  - apply beginning_is_kept; assumption.
  - apply going_on_is_kept; assumption.
  - eapply counting_is_kept; eassumption.
Qed.

Lemma every_run_is_of_the_system : forall n s, shared_run n s -> books s /\ forall input, extends input s ->
  exists m, n <= beginners s + m /\ lossy_path W own depth input (start own) m (base s).
Proof.
  assert (Next : forall n s s', (books s /\ forall input, extends input s -> exists m, n <= beginners s + m /\ lossy_path W own depth input (start own) m (base s)) ->
    (lossy_reachable W own depth (fun q => content (places s q)) (base s) -> kept s s') ->
    books s' /\ forall input, extends input s' -> exists m, S n <= beginners s' + m /\ lossy_path W own depth input (start own) m (base s')).
  { intros n s s' [B IH] K. destruct (IH _ (content_of_places s)) as [m0 [_ P0]]. destruct (K (ex_intro _ m0 P0)) as [B' K']. split; [exact B'|].
    intros input X'. destruct (K' input X') as [X [k [Lk D]]]. destruct (IH input X) as [m [Lm P]]. destruct (D _ m P) as [m' [L P']]. exists m'. split; [lia|exact P']. }
  induction 1 as [|n s l s' R IH St|n s r peer cause R IH Hr En].
  - split; [apply start_books|]. intros input _. exists 0. split; [lia|apply lossy_here].
  - apply (Next n s s' IH). intros Rb. exact (a_shared_step_is_kept s l s' (proj1 IH) Rb St).
  - apply (Next n s _ IH). intros _. apply loss_is_kept; [apply IH|exact Hr|exact En].
Qed.

Lemma shared_books : forall s, shared_reachable s -> books s.
Proof. intros s [n R]. apply (every_run_is_of_the_system n s R). Qed.

(** DEAL: apart from its books, a run of shared shards is one of ranks whose input is what they drew. So everything proved of runs with
    losses holds of shared shards. *)
Theorem a_run_of_shared_shards_is_one_of_shards_of_ones_own : forall s, shared_reachable s ->
  lossy_reachable W own depth (fun r => content (places s r)) (base s).
Proof.
  intros s [n R]. destruct (every_run_is_of_the_system n s R) as [_ H]. destruct (H _ (content_of_places s)) as [m [_ P]]. exists m. exact P.
Qed.

(** And what leads from one moment of it to another does so there. *)
Theorem a_path_of_shared_shards_is_one_of_shards_of_ones_own : forall s n t, shared_reachable s -> shared_path s n t ->
  let input := fun r => content (places t r) in lossy_reachable W own depth input (base s) /\ exists m, lossy_path W own depth input (base s) m (base t).
Proof.
  intros s n t [n0 R0] P input. assert (X : shared_reachable t /\ forall input, extends input t -> extends input s /\ exists m, lossy_path W own depth input (base s) m (base t)).
  { clear input. induction P as [|n u l t P IH St|n u r peer cause P IH Hr En].
    - split; [exists n0; exact R0|]. intros input X. split; [exact X|]. exists 0. apply lossy_here.
    - destruct IH as [[k R] IH]. split; [exists (S k); exact (run_on _ _ _ _ _ _ _ _ k u l t R St)|]. intros input X.
      destruct (a_shared_step_is_kept u l t (shared_books u (ex_intro _ k R)) (a_run_of_shared_shards_is_one_of_shards_of_ones_own u (ex_intro _ k R)) St) as [_ K].
      destruct (K input X) as [Xu [j [_ D]]]. destruct (IH input Xu) as [Xs [m Pm]]. split; [exact Xs|]. destruct (D _ m Pm) as [m' [_ P']]. exists m'. exact P'.
    - destruct IH as [[k R] IH]. split; [exists (S k); exact (run_lost _ _ _ _ _ _ _ _ k u r peer cause R Hr En)|]. intros input X.
      destruct (loss_is_kept u r peer cause (shared_books u (ex_intro _ k R)) Hr En) as [_ K].
      destruct (K input X) as [Xu [j [_ D]]]. destruct (IH input Xu) as [Xs [m Pm]]. split; [exact Xs|]. destruct (D _ m Pm) as [m' [_ P']]. exists m'. exact P'. }
  destruct X as [_ X]. destruct (X input (content_of_places t)) as [Xs Pm]. split; [|exact Pm].
  destruct (every_run_is_of_the_system n0 s R0) as [_ H]. destruct (H input Xs) as [m [_ P0]]. exists m. exact P0.
Qed.

(** ** What follows *)

(** ALIGN. *)
Theorem with_shared_shards_rounds_are_aligned : forall s r q j x y, shared_reachable s -> r < W -> q < W ->
  nth_error (steps_of (rank_of (base s) r)) j = Some x -> nth_error (steps_of (rank_of (base s) q)) j = Some y ->
  s_number x = j /\ s_number y = j /\ s_round x = s_round y /\ s_counts x = s_counts y.
Proof. intros s r q j x y R. exact (with_losses_rounds_are_aligned W own depth _ (base s) r q j x y (on_its_way own_ok (a_run_of_shared_shards_is_one_of_shards_of_ones_own s R))). Qed.

Theorem with_shared_shards_every_rank_makes_the_same_number_of_steps_in_a_round : forall s r q k, shared_reachable s -> r < W -> q < W ->
  k < round (rank_of (base s) r) -> k < round (rank_of (base s) q) ->
  length (steps_in_round k (rank_of (base s) r)) = length (steps_in_round k (rank_of (base s) q)).
Proof.
  intros s r q k R.
  exact (with_losses_every_rank_makes_the_same_number_of_steps_in_a_round W own depth _ (base s) r q k (on_its_way own_ok (a_run_of_shared_shards_is_one_of_shards_of_ones_own s R))).
Qed.

(** STOP. *)
Theorem with_shared_shards_no_consumer_takes_more_than_one_step_beyond_one_that_stopped : forall s n t r q, shared_reachable s -> shared_path s n t -> r < W -> q < W ->
  stopped (rank_of (base s) q) = true -> length (taken (rank_of (base t) r)) <= length (taken (rank_of (base s) q)) + 1.
Proof.
  intros s n t r q R P Hr Hq. destruct (a_path_of_shared_shards_is_one_of_shards_of_ones_own s n t R P) as [Rb [m Pb]].
  exact (with_losses_no_consumer_takes_more_than_one_step_beyond_one_that_stopped W own depth _ own_ok (base s) m (base t) r q (on_its_way own_ok Rb) Pb Hr Hq).
Qed.

(** ABORT, STOP. *)
Theorem with_shared_shards_a_failure_or_a_stop_ends_every_other_rank_in_its_round_or_the_next : forall k s n t r q,
  shared_reachable s -> shared_path s n t -> r < W -> q < W ->
  hit k (rank_of (base s) r) -> is_ending (rank_of (base s) r) = false -> is_ending (rank_of (base t) q) = true -> is_lost (rank_of (base t) q) = false ->
  ends_in_time k (rank_of (base s) r) (rank_of (base t) q) (outcome_true W own (base t)).
Proof.
  intros k s n t r q R P. destruct (a_path_of_shared_shards_is_one_of_shards_of_ones_own s n t R P) as [Rb [m Pb]].
  exact (with_losses_a_failure_or_a_stop_ends_every_other_rank_in_its_round_or_the_next W own depth _ own_ok k (base s) m (base t) r q (on_its_way own_ok Rb) Pb).
Qed.

Theorem with_shared_shards_ranks_that_have_ended_are_lost_or_agree : forall s r q, shared_reachable s -> r < W -> q < W -> let u := rank_of (base s) r in let v := rank_of (base s) q in
  is_ending u = true -> is_ending v = true -> is_lost u = false -> is_lost v = false ->
  ended_as u = ended_as v /\ round u = round v /\ length (released_of u) = length (released_of v).
Proof. intros s r q R. exact (ranks_that_have_ended_are_lost_or_agree W own depth _ (base s) r q (on_its_way own_ok (a_run_of_shared_shards_is_one_of_shards_of_ones_own s R))). Qed.

(** AGE, in join mode, without updates. *)
Theorem with_shared_shards_a_sample_held_in_round_k_is_in_a_step_of_round_k_plus_max_age_at_the_latest :
  (forall r, r < W -> c_updates (cfg r) = None) -> (forall r, r < W -> c_is_quota (cfg r) = false /\ c_quota (cfg r) = None) ->
  forall s n t r x, shared_reachable s -> shared_path s n t -> r < W -> let u := rank_of (base s) r in let v := rank_of (base t) r in
  at_phase u <> COUNT -> is_lost u = false -> In x (window u) -> round u + c_max_age (own r) < round v ->
  exists y, In y (steps_of v) /\ In x (s_group y) /\ s_round y <= round u + c_max_age (own r).
Proof.
  intros Up Jm s n t r x R P. destruct (a_path_of_shared_shards_is_one_of_shards_of_ones_own s n t R P) as [Rb [m Pb]].
  exact (with_losses_a_sample_held_in_round_k_is_in_a_step_of_round_k_plus_max_age_at_the_latest W own depth _ own_ok Up Jm
    (fun q i y _ => content_is_numbered _ 0 i y) (base s) m (base t) r x Rb Pb).
Qed.

Theorem with_shared_shards_nothing_is_lost : forall s r, shared_reachable s -> r < W ->
  let u := rank_of (base s) r in
  Permutation (samples_of (steps_of u) ++ concat (aligned u) ++ window u ++ skipn (read u) (content (places s r))) (content (places s r)).
Proof. intros s r R. exact (with_losses_no_sample_goes_missing W own depth _ (base s) r (on_its_way own_ok (a_run_of_shared_shards_is_one_of_shards_of_ones_own s R))). Qed.

Theorem a_rank_has_drawn_what_was_dealt_to_it : forall s r, shared_reachable s -> r < W -> begun s r = true ->
  places s r = drawn_by r (rounds_of s r) /\ upto s r = drawn (rounds_of s r) /\
  length (rounds_of s r) = S (round (rank_of (base s) r)).
Proof.
  intros s r R Hr Bg. pose proof (shared_books s R) as B. pose proof (b_rank _ B r Hr) as Bk. split; [exact (b_places _ _ Bk Bg)|]. split; [exact (b_upto _ _ Bk Bg)|].
  unfold rounds_of. rewrite app_length, rev_length, (b_round _ _ Bk Bg). simpl. lia.
Qed.

Definition every_round (s : shared_sys) : list (nat -> nat) :=
  rev (flat_map of_counts (told s)) ++ [first_wants].

Lemma heard_first : forall s r, exists more, every_round s = more ++ rounds_of s r.
Proof.
  intros s r. unfold every_round, rounds_of, heard. exists (rev (flat_map of_counts (skipn (got (base s) r) (told s)))).
  rewrite app_assoc, <- rev_app_distr, <- flat_map_app, firstn_skipn. reflexivity.
Qed.

Theorem the_order_ends_on_all_ranks_in_the_same_round : forall s r q, shared_reachable s -> r < W -> q < W -> begun s r = true -> begun s q = true ->
  round (rank_of (base s) r) = round (rank_of (base s) q) ->
  ended (rank_of (base s) r) = ended (rank_of (base s) q) /\ upto s r = upto s q.
Proof.
  intros s r q R Hr Hq Br Bq E. pose proof (shared_books s R) as B.
  destruct (a_rank_has_drawn_what_was_dealt_to_it s r R Hr Br) as [_ [Ur Lr]]. destruct (a_rank_has_drawn_what_was_dealt_to_it s q R Hq Bq) as [_ [Uq Lq]].
  assert (Same : rounds_of s r = rounds_of s q).
  { destruct (heard_first s r) as [a Ea]. destruct (heard_first s q) as [b Eb]. rewrite Ea in Eb. rewrite E, <- Lq in Lr. clear - Eb Lr.
    assert (L : length a = length b) by (apply (f_equal (@length (nat -> nat))) in Eb; rewrite !app_length in Eb; lia).
    revert b L Eb. induction a as [|x a IH]; intros [|y b] L Eb; simpl in *; try discriminate; [exact Eb|]. injection Eb as _ Eb. injection L as L. exact (IH b L Eb). }
  assert (U : upto s r = upto s q) by (rewrite Ur, Uq, Same; reflexivity). split; [|exact U].
  rewrite (b_ended _ _ (b_rank _ B r Hr) Br), (b_ended _ _ (b_rank _ B q Hq) Bq), U. reflexivity.
Qed.

Lemma drawn_by_more : forall i new old, exists more, drawn_by i (new ++ old) = drawn_by i old ++ more.
Proof.
  intros i. induction new as [|ws new IH]; intros old; simpl; [exists []; rewrite app_nil_r; reflexivity|].
  destruct (IH old) as [more ->]. rewrite <- app_assoc. eauto.
Qed.

Lemma nothing_after_the_end : forall i new old, i < W -> drawn old = total ->
  drawn (new ++ old) = total /\ drawn_by i (new ++ old) = drawn_by i old.
Proof.
  intros i new old Hi D. induction new as [|ws new [IH1 IH2]]; simpl; [auto|]. rewrite IH1, IH2. set (k := length (new ++ old)). pose proof (dealt_within W total deal deal_next k ws total).
  pose proof (share_within W deal k ws total i Hi). split; [lia|]. assert (Z : length (deal k ws total i) = 0) by lia. apply length_zero_iff_nil in Z. rewrite Z. apply app_nil_r.
Qed.

Lemma places_first : forall s r, books s -> r < W -> exists more, drawn_by r (every_round s) = places s r ++ more.
Proof.
  intros s r B Hr. pose proof (b_rank _ B r Hr) as Bk. destruct (begun s r) eqn:Bg.
  - destruct (heard_first s r) as [a ->]. rewrite (b_places _ _ Bk Bg). apply drawn_by_more.
  - destruct (b_fresh _ _ Bk Bg) as [_ [_ [_ [-> _]]]]. simpl. eauto.
Qed.

(** The place in the order of a rank's sample. *)
Definition place_of (s : shared_sys) (r : nat) (x : sample) : nat := nth (pos x) (places s r) 0.
Definition planned_places (s : shared_sys) (r : nat) : list nat := map (place_of s r) (samples_of (steps_of (rank_of (base s) r))).

Theorem with_shared_shards_every_schedule_ends_within_the_bound : forall n s, shared_run n s -> let rounds := update_rounds (cfg 0) * S total - 1 in
  n <= 2 * rounds + 2 + W * (4 * rounds + 2 * total + 7) + total + W + W.
Proof.
  intros n s R rounds. destruct (every_run_is_of_the_system n s R) as [B H]. set (input := fun r => content (places s r)).
  destruct (H input (content_of_places s)) as [m [Lm P]]. pose proof (beginners_within s). pose proof (every_schedule_with_losses_ends_within_the_bound W own depth input own_ok m _ P) as Bd.
  assert (Few : Termination.total W input <= total).
  { pose proof (no_more_is_drawn_than_there_is W total deal deal_next (every_round s)) as D.
    pose proof (Permutation_length (every_place_dealt_is_drawn_once_by_one_rank W total deal deal_next (every_round s))) as L.
    rewrite seq_length in L. rewrite <- L in D. eapply Nat.le_trans; [|exact D]. unfold Termination.total, ranks.
    assert (A : forall q, In q (seq 0 W) -> q < W) by (intros q I; apply in_seq in I; lia). revert A. generalize (seq 0 W). clear D L.
    induction l as [|q l IH]; intros A; simpl; [lia|]. rewrite app_length. specialize (IH (fun z I => A z (or_intror I))).
    destruct (places_first s q B (A q (or_introl eq_refl))) as [more E]. rewrite E, app_length. unfold input at 1. rewrite content_length. lia. }
  assert (None : over W (fun r => if c_bounded (own r) r then exchanges W own input + 1 else 0) = 0).
  { rewrite (sum_over_ext _ _ (fun _ => 0)), sum_over_const by (intros r; unfold c_bounded; simpl; rewrite andb_false_r; reflexivity). lia. }
  assert (Fewer : most_rounds W own input <= rounds).
  { unfold most_rounds, rounds. change (update_rounds (own 0)) with (update_rounds (cfg 0)). apply Nat.sub_le_mono_r, Nat.mul_le_mono_l. lia. }
  unfold bound in Bd. rewrite None in Bd. unfold exchanges in Bd.
  assert (W * (4 * most_rounds W own input + 2 * Termination.total W input + 7) <= W * (4 * rounds + 2 * total + 7)) by (apply Nat.mul_le_mono_l; lia). lia.
Qed.

Lemma places_of_a_part : forall l a c, map (fun x => nth (pos x) (a ++ l ++ c) 0) (content_from order (length a) l) = l.
Proof.
  clear deal_first. induction l as [|p l IH]; intros a c; simpl; [reflexivity|]. rewrite app_nth2, Nat.sub_diag by lia. simpl. f_equal.
  specialize (IH (a ++ [p]) c). rewrite <- app_assoc in IH. simpl in IH. rewrite app_length in IH. simpl in IH. rewrite Nat.add_1_r in IH. exact IH.
Qed.

Lemma place_of_content : forall s r, map (place_of s r) (content (places s r)) = places s r.
Proof. intros s r. pose proof (places_of_a_part (places s r) [] []) as H. rewrite app_nil_r in H. exact H. Qed.

Theorem no_place_is_in_two_steps_of_the_job : forall s, shared_reachable s -> NoDup (concat (map (planned_places s) (seq 0 W))).
Proof.
  intros s R. pose proof (shared_books s R) as B.
  set (rest := fun r => let u := rank_of (base s) r in map (place_of s r) (concat (aligned u) ++ window u ++ skipn (read u) (content (places s r))) ++
    skipn (length (places s r)) (drawn_by r (every_round s))).
  apply (NoDup_first _ _ (concat (map rest (seq 0 W)))).
  apply (Permutation_NoDup (l := concat (map (fun r => drawn_by r (every_round s)) (ranks W))));
    [|apply (no_place_is_drawn_twice W total deal deal_next)].
  eapply Permutation_trans; [|apply concat_map_app]. apply each_gives. intros r Hr. destruct (places_first s r B Hr) as [more E]. unfold rest. rewrite E, skipn_app, skipn_all, Nat.sub_diag. simpl.
  rewrite app_assoc. apply Permutation_app_tail. unfold planned_places. rewrite <- map_app. apply (Permutation_trans (l' := map (place_of s r) (content (places s r)))); [rewrite place_of_content; reflexivity|].
  apply Permutation_map. symmetry. exact (with_shared_shards_nothing_is_lost s r R Hr).
Qed.

Lemma a_complete_rank_has_planned_what_it_has_drawn : forall s r, shared_reachable s -> r < W -> c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
  is_ending (rank_of (base s) r) = true -> ended_as (rank_of (base s) r) = Some Complete ->
  drawn (rounds_of s r) = total /\ begun s r = true /\ Permutation (samples_of (steps_of (rank_of (base s) r))) (content (places s r)).
Proof.
  intros s r R Hr Jm Nq En O. pose proof (b_rank _ (shared_books s R) r Hr) as Bk. pose proof (a_run_of_shared_shards_is_one_of_shards_of_ones_own s R) as Rb. set (input := fun q => content (places s q)) in *.
  assert (Bg : begun s r = true).
  { destruct (begun s r) eqn:Bg; [reflexivity|]. destruct (b_fresh _ _ Bk Bg) as [_ [[F|[p [c F]]] _]]; rewrite F in O; [discriminate|].
    unfold lose in O. rewrite initial_goes_on in O. discriminate. }
  assert (P : Permutation (samples_of (steps_of (rank_of (base s) r))) (content (places s r)))
    by exact (with_losses_a_complete_rank_has_planned_its_whole_input W own depth input (base s) r (on_its_way own_ok Rb) Hr Jm Nq En O).
  split; [|auto]. rewrite <- (b_upto _ _ Bk Bg). apply Nat.eqb_eq. rewrite <- (b_ended _ _ Bk Bg).
  destruct (a_live_rank_is_followed W own depth input own_ok (base s) r Rb Hr) as [v [Rv [_ [Er _]]]]; [exact (complete_is_not_lost _ O)|]. rewrite Er in *.
  exact (a_complete_rank_has_read_its_whole_input W own depth input v r (sound_of own_ok Rv) Hr Jm Nq En O).
Qed.

Theorem a_complete_job_has_planned_each_place_once : forall s, shared_reachable s -> c_is_quota (cfg 0) = false -> c_quota (cfg 0) = None ->
  (forall r, r < W -> is_ending (rank_of (base s) r) = true /\ ended_as (rank_of (base s) r) = Some Complete) ->
  Permutation (concat (map (planned_places s) (seq 0 W))) (seq 0 total).
Proof.
  intros s R Jm Nq Cp. pose proof (shared_books s R) as B.
  pose proof (fun r Hr => a_complete_rank_has_planned_what_it_has_drawn s r R Hr Jm Nq (proj1 (Cp r Hr)) (proj2 (Cp r Hr))) as Each.
  assert (Dr : drawn (every_round s) = total).
  { destruct (Each 0 (some_rank _ _ ok)) as [D _]. destruct (heard_first s 0) as [a ->]. apply (nothing_after_the_end 0 a _ (some_rank _ _ ok) D). }
  rewrite <- Dr. eapply Permutation_trans; [|apply (every_place_dealt_is_drawn_once_by_one_rank W total deal deal_next)].
  apply each_gives. intros r Hr. destruct (Each r Hr) as [D [Bg P]]. destruct (heard_first s r) as [a Ea]. rewrite Ea. destruct (nothing_after_the_end r a _ Hr D) as [_ ->].
  rewrite <- (b_places _ _ (b_rank _ B r Hr) Bg). unfold planned_places. rewrite P, place_of_content. reflexivity.
Qed.

End Job.

(** ** The shipped deal, and wants by tokens (R14.2) *)

Definition tokens_of (l : list sample) : nat := sum_over len l.

(** The size of a window. For packed rows near the end it is at most what is left for each rank, but at least half the size. *)
Definition shared_window (W total : nat) (is_packed : bool) (size d : nat) : nat :=
  if is_packed then Nat.min size (Nat.max ((total - d + W - 1) / W) (Nat.div2 (S size))) else size.

(** What is carried counts by its tokens, as a number of samples of average length. *)
Definition wish_for (size : nat) (held carried : list sample) : nat :=
  size - (if tokens_of carried =? 0 then 0 else (length held * tokens_of carried + tokens_of held - 1) / tokens_of held).

Definition wish_by_tokens (W total : nat) (is_packed : bool) (cfg : nat -> config) (r k d : nat) (held carried : list sample) : nat :=
  wish_for (shared_window W total is_packed (c_window (cfg r) r k) d) held carried.

Lemma a_shared_window_is_not_empty : forall W total is_packed size d, 1 <= size -> 1 <= shared_window W total is_packed size d.
Proof.
  intros W total is_packed size d S. unfold shared_window. destruct is_packed; [|exact S]. apply Nat.min_glb; [exact S|].
  apply (Nat.le_trans _ (Nat.div2 (Datatypes.S size))); [destruct size; simpl; lia|apply Nat.le_max_r].
Qed.

Theorem the_shipped_wants_meet_every_assumption : forall W total is_packed cfg, setting_ok W cfg -> (forall r, r < W -> c_updates (cfg r) = None) ->
  forall r k d w, r < W -> 1 <= wish_by_tokens W total is_packed cfg r k d w [].
Proof.
  intros W total is_packed cfg ok Nu r k d w H. unfold wish_by_tokens, wish_for. change (tokens_of [] =? 0) with true. cbn iota. rewrite Nat.sub_0_r.
  apply a_shared_window_is_not_empty, (ok_window _ (configs_ok _ _ ok r H)), (without_updates _ (Nu r H)).
Qed.
