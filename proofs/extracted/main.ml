(* Reads cases as words on standard input, runs the extracted model, prints one line per answer. See tests/proofs. *)
open Model

let int () = Scanf.scanf " %d" (fun x -> x)
let word () = Scanf.scanf " %s" (fun x -> x)
let list read = let n = int () in List.init n (fun _ -> read ())
let option () = match int () with -1 -> None | n -> Some n
let bool () = int () = 1

let sample () =
  let sid = int () in let pos = int () in let len = int () in let sup = int () in
  { sid; pos; len; sup; costs = list int }

let counts () =
  let n_samples = int () in let n_tokens = int () in let n_supervised = int () in
  { n_samples; n_tokens; n_supervised; n_costs = list int }

let offer () =
  let o_round_min = int () in let o_round_max = int () in
  let o_print_min = int () in let o_print_max = int () in
  let o_ready = bool () in let o_failed = option () in
  let o_stop_step = option () in let o_stop_rank = option () in
  let o_samples_min = int () in let o_samples_max = int () in
  let o_groups_min = option () in let o_groups_max = int () in let o_due_max = int () in let o_budget = option () in
  { o_round_min; o_round_max; o_print_min; o_print_max; o_ready; o_failed; o_stop_step; o_stop_rank;
    o_samples_min; o_samples_max; o_groups_min; o_groups_max; o_due_max; o_budget }

let report () =
  let r_rank = int () in let r_cause = option () in let r_round = int () in let r_print = int () in
  { r_rank; r_cause; r_round; r_print }

let rule () = match word () with
  | "odb" -> odb_rule
  | "paper" -> paper_rule
  | name -> failwith ("no rule " ^ name)

let event = function
  | "read" -> let is_ended = bool () in let is_full = bool () in SamplesRead (list sample, is_ended, is_full)
  | "collated" -> Collated
  | "agreed" -> Got (Agreed (offer ()))
  | "counted" -> Got (Counted (list counts))
  | "reported" -> Got (Reported (list report))
  | "taken" -> StepTaken
  | "stopped" -> ConsumerStopped
  | "failed" -> LocalFailed (int ())
  | "urged" -> Urged
  | name -> failwith ("no event " ^ name)

let occurrence = function
  | "lost" -> let peer = option () in PeerLost (peer, int ())
  | name -> Event (event name)

let show_int = string_of_int
let show_bool b = if b then "1" else "0"
let show_option = function None -> "-1" | Some n -> string_of_int n
let show_list show items = "[" ^ String.concat " " (List.map show items) ^ "]"
let show_group g = show_list (fun s -> show_int s.pos) g
(* Zeros at the end are left out: to the model an amount that is missing is 0. *)
let rec trim = function 0 :: rest -> trim rest | rest -> rest
let show_counts c =
  let costs = List.rev (trim (List.rev c.n_costs)) in
  String.concat "/" (List.map show_int (c.n_samples :: c.n_tokens :: c.n_supervised :: costs))
let show_step s = Printf.sprintf "%d:%d:%s:%s" s.s_number s.s_round (show_group s.s_group) (show_counts s.s_counts)

let show_offer o =
  String.concat " "
    [ show_int o.o_round_min; show_int o.o_round_max; show_int o.o_print_min; show_int o.o_print_max; show_bool o.o_ready;
      show_option o.o_failed; show_option o.o_stop_step; show_option o.o_stop_rank; show_int o.o_samples_min;
      show_int o.o_samples_max; show_option o.o_groups_min; show_int o.o_groups_max; show_int o.o_due_max; show_option o.o_budget ]

let show_message = function
  | MOffer o -> "offer " ^ show_offer o
  | MCounts cs -> "counts " ^ show_list show_counts cs
  | MReport r -> Printf.sprintf "report %d %s %d %d" r.r_rank (show_option r.r_cause) r.r_round r.r_print

let show_phase = function
  | FILL -> "fill" | OFFER -> "offer" | COUNT -> "count" | REPORT -> "report" | DRAIN -> "drain" | DONE -> "done"

let show_outcome = function
  | None -> "-"
  | Some Complete -> "complete"
  | Some (Stopped (r, _)) -> "stopped " ^ show_int r
  | Some (Failed (r, c)) -> Printf.sprintf "failed %d %d" r c
  | Some (Mismatch r) -> "mismatch " ^ show_int r
  | Some (Lost (p, c)) -> Printf.sprintf "lost %s %d" (show_option p) c

(* [accepted] is what the rank accepts, as it would offer it: no part of the model's state. *)
let show_state accepted s =
  String.concat " | "
    [ show_phase s.at_phase; show_int s.round; show_int s.read; show_bool s.ended; show_int s.wanted; show_group s.window;
      show_list show_int s.marks; show_list show_group s.groups; show_option s.budget; show_option accepted; show_list show_group s.aligned; show_list show_step s.plan;
      show_bool s.collated; show_int s.planned; show_int s.gsum; show_list show_step s.released; show_list show_step s.queue;
      show_int (List.length s.taken); show_option s.failure; show_bool s.stopped; show_bool s.urged; show_option s.limit;
      show_outcome s.ended_as ]

(* R4.9: a step of SplitMix64. *)
let mix x =
  let open Int64 in
  let mixed z bits = logxor z (shift_right_logical z bits) in
  let z = add x 0x9E3779B97F4A7C15L in
  let z = mul (mixed z 30) 0xBF58476D1CE4E5B9L in
  mixed (mul (mixed z 27) 0x94D049BB133111EBL) 31

(* The sampler's order, or which of two places of a round comes first. *)
let order () = match word () with
  | "sampler" -> let _ = word () in Sampler
  | "fullest" -> let _ = word () in ByPlaces (fun _ i j -> i <= j)
  | "shuffled" ->
    let seed = Scanf.scanf " %Lu" (fun x -> x) in
    let hash k i = mix (Int64.logxor (mix (Int64.logxor (mix seed) (Int64.of_int k))) (Int64.of_int i)) in
    ByPlaces (fun k i j -> Int64.unsigned_compare (hash k i) (hash k j) <= 0)
  | name -> failwith ("no order " ^ name)

let layout () = match word () with
  | "padded" -> Padded
  | "packed" -> Packed
  | name -> failwith ("no layout " ^ name)

let sizes () = match word () with
  | "any" -> Any
  | "even" -> Even
  | "threes" -> Threes
  | "powers" -> Powers
  | name -> failwith ("no sizes " ^ name)

(* What a sample of so many tokens costs; stairs are a cost of one's own. *)
let cost () = match word () with
  | "tokens" -> tokens_cost
  | "attention" -> attention_cost (int ())
  | "stairs" -> let width = int () in fun tokens -> 1 + tokens / width
  | name -> failwith ("no cost " ^ name)

(* A configuration, with how its rank offers what it is told to accept, and what it accepts when it begins. *)
let config () =
  let layout = layout () in let cost = cost () in
  let budget = int () in let limits = list int in let size = int () in let ramp = int () in let max_age = int () in
  let is_quota = bool () in let quota = option () in let rule = rule () in let print = int () in
  let order = order () in let rank = int () in let depth = int () in let is_bounded = bool () in
  let tokens () = match int () with -1 -> budget | n -> n in
  let first = tokens () in let accepted = tokens () in
  (* Only in updates is padding limited: elsewhere all may be padding. *)
  let ranks = int () in let update = int () in let rounds = int () in let padding_share = int () in
  let c = shipped layout cost budget padding_share limits (fun _ -> first) (fun _ _ -> accepted) size ramp max_age is_quota quota rule print order (fun _ -> is_bounded) in
  let c = if update = 0 then c else if rounds = 0 then in_updates ranks update c else in_portions rounds c in
  (c, rank, depth, offered budget, offered budget accepted)

(* A rank whose first round reads nothing posts its offer when it begins. *)
let before s = { s with at_phase = FILL }

(* Every event of one rank. [show] prints what the case asks for of a state, and of the one before it. *)
let run_events show =
  let c, rank, depth, offer, accepted = config () in
  let hears b = accepting c (fun _ -> b) in
  let refuse b s = print_endline "refused"; (b, s) in
  let go_on b s t = print_endline (show (hears b) rank b s t); (b, t) in
  let step (b, s) = function
    | "accepted" -> let tokens = int () in if tokens < 1 then refuse b s else go_on (offer tokens) s s
    | name -> match handle (hears b) rank depth s (occurrence name) with None -> refuse b s | Some t -> go_on b s t in
  let s = initial c rank in
  let told = ref (go_on accepted (before s) s) in
  let n = int () in
  for _ = 1 to n do told := step !told (word ()) done

let show_posted s t = match t.posted with Some m when has_posted s t -> show_message m | _ -> "-"
let show_move _ _ accepted s t = show_state accepted t ^ " | " ^ show_posted s t

(* In a round that has begun, what is loaded of what a rank saves. *)
let show_loaded c rank accepted _ t =
  match t.at_phase with
    | FILL | OFFER -> let u = load c rank (List.init t.planned (fun n -> { s_number = n; s_round = 0; s_group = []; s_counts = zero_counts })) (save t) in
        show_state accepted u ^ " | " ^ (match u.posted with Some m -> show_message m | None -> "-")
    | _ -> "-"

(* Every event of one rank that draws (R14): as [SharedBegins], [SharedGoesOn] and [SharedCounted] of Drawing.v put them together. *)
let run_shared () =
  let ranks = int () in let total = int () in let update = int () in let is_packed = bool () in
  let c, rank, depth, offer, accepted = config () in
  let hears b = accepting c (fun _ -> b) in
  let wish _ k d held carried =
    if update > 0 then tokens_of0 carried else wish_for (shared_window ranks total is_packed (c.c_window rank k) d) held carried in
  let upto = ref 0 and places = ref [] in
  let share = match c.c_updates with
    | None -> deal_in_turn ranks total
    | Some rounds -> fun k wants d i -> by_load update rounds total (fun _ -> List.init ranks wants) k d i in
  (* What is drawn for a round of what all want: the state that has drawn it, and how the rank's books are then kept. *)
  let deal k wants s =
    let mine = share k wants !upto rank in
    let far = !upto + List.length (dealt_out ranks share k wants !upto) in
    let s = if s.ended || (mine = [] && far < total) then s else draws (List.length mine) (far = total) s in
    s, fun () -> places := !places @ mine; upto := far in
  let show b t posted want =
    print_endline (String.concat " | " [ show_state b t; posted; want; show_int !upto; show_list show_int !places ]) in
  let go_on b s t name =
    let posted = show_posted s t in
    let is_counts = match t.posted with Some (MCounts _) -> posted <> "-" | _ -> false in
    show b t posted (if is_counts && name = "agreed" then show_int (wish_of wish rank !upto s t) else "-");
    (b, t) in
  let refuse b s = print_endline "refused"; (b, s) in
  let step (b, s) = function
    | "accepted" -> let tokens = int () in if tokens < 1 then refuse b s else go_on (offer tokens) s s "accepted"
    | "counted" ->
        let cs = list counts in
        let drawn, keep = deal (s.round + 1) (List.nth (list int)) s in
        (match transition (hears b) rank depth drawn (Got (Counted cs)) with
         | None -> refuse b s
         | Some t -> keep (); go_on b s t "counted")
    | name -> (match handle_shared (hears b) rank depth s (event name) with None -> refuse b s | Some t -> go_on b s t name) in
  let s = initial (shared_config (fun _ -> c) share rank) rank in
  let drawn, keep = if c.c_updates = None then deal 0 (first_wants (fun _ -> c)) s else s, ignore in
  keep ();
  let told = ref (go_on accepted (before s) (post (hears accepted) rank drawn) "begins") in
  let n = int () in
  for _ = 1 to n do told := step !told (word ()) done

(* The coupled system, state by state: what was met is kept by number. A trainer leaves a step as late as it can, the exchange
   completes as soon as it can. *)

let choice () = match word () with
  | "read" -> let r = int () in let n = int () in let is_ended = bool () in CRead (r, n, is_ended, bool ())
  | "collate" -> CCollate (int ())
  | "answer" -> CAnswer (int ())
  | "take" -> CTake (int ())
  | "leave" -> CLeave (int ())
  | "fail" -> let r = int () in CFail (r, int ())
  | "urge" -> CUrge (int ())
  | "lose" -> let r = int () in let peer = option () in CLose (r, peer, int ())
  | name -> failwith ("no choice " ^ name)

let show_decision = function Closes -> "closes" | Makes n -> show_int n

let show_answer c = function
  | Agreed a ->
      let is_plain = not (is_bad a) && a.o_stop_rank = None && a.o_ready in
      Printf.sprintf "agreed %s target %s" (show_offer a) (if is_plain then show_decision (target c a) else "-")
  | Counted cs -> "counted " ^ show_list show_counts cs
  | Reported rs -> "reported " ^ show_list (fun r -> show_message (MReport r)) rs

let run_system () =
  let ranks = int () in
  let of_list items = let all = Array.of_list items in fun r -> all.(r) in
  let read _ = let c, _, depth, _, _ = config () in let shard = list sample in (c, depth, shard) in
  let each = of_list (List.map read (List.init ranks Fun.id)) in
  let cfg r = let c, _, _ = each r in c in
  let depth r = let _, d, _ = each r in d in
  let input r = let _, _, i = each r in i in
  let do_ s c = perform ranks cfg depth input s c in
  let tabulate s =
    let keep f = of_list (List.map f (List.init ranks Fun.id)) in
    { s with rank_of = keep s.rank_of; got = keep s.got; pending = keep s.pending; running = keep s.running } in
  let settle s = tabulate (match do_ s CExchange with Some t -> t | None -> s) in
  let show_rank s r =
    let u = s.rank_of r in
    let post = match u.posted with Some m when is_waiting u -> show_message m | _ -> "-" in
    let owed = not (s.pending r) && s.got r < List.length s.log in
    Printf.sprintf "%s | %s | %s" (show_state None u) post (show_bool owed) in
  let show s =
    let is_open = List.exists (fun r -> not (s.pending r) && s.got r < List.length s.log) (List.init ranks Fun.id) in
    let answer = if is_open then show_answer (cfg 0) (snd (List.nth s.log (List.length s.log - 1))) else "-" in
    String.concat " || " (List.map (show_rank s) (List.init ranks Fun.id) @ [answer]) in
  let numbers = Hashtbl.create 1000 and states = Hashtbl.create 1000 in
  let number s =
    let label = show s in
    let key = (label, List.map s.running (List.init ranks Fun.id)) in
    let n = match Hashtbl.find_opt numbers key with
      | Some n -> n
      | None -> let n = Hashtbl.length numbers in Hashtbl.add numbers key n; Hashtbl.add states n s; n in
    Printf.sprintf "%d %s" n label in
  let step s c =
    let s = match c with
      | CTake r when s.running r -> (match do_ s (CTrained r) with Some t -> t | None -> s)
      | _ -> s in
    Option.map settle (do_ s c) in
  print_endline (number (settle (start cfg)));
  let rec go () = match int () with
    | -1 -> ()
    | n ->
        let s = Hashtbl.find states n in
        let count = int () in
        for _ = 1 to count do
          print_endline (match step s (choice ()) with Some t -> number t | None -> "-")
        done;
        flush stdout; go () in
  flush stdout; go ()

(* What the trainers of all ranks get and how they end, where each rank in turn does what it can. One may fail when it reads the
   window of a round or collates its steps; and all may be loaded from where a round began. *)
let run_epoch () =
  let ranks = int () in
  let all = List.init ranks Fun.id in
  let each = Array.of_list (List.map (fun _ -> let c, _, depth, _, _ = config () in (c, depth, list sample)) all) in
  let cfg r = let c, _, _ = each.(r) in c in
  let depth r = let _, d, _ = each.(r) in d in
  let input r = let _, _, i = each.(r) in i in
  let culprit = option () in let place = word () in let failing = int () in
  let moment = option () in
  let moments = Array.of_list (List.map (fun r -> initial (cfg r) r) all) in
  let fails r what round = culprit = Some r && place = what && failing = round in
  let read r s =
    let u = s.rank_of r in
    let left = List.length (input r) - u.read in
    let n = min u.wanted left in
    if u.wanted > 0 && fails r "read" (if u.at_phase = COUNT then u.round + 1 else u.round) then CFail (r, 1)
    else CRead (r, n, n = left, false) in
  let collate r s =
    let u = s.rank_of r in if not u.collated && fails r "collate" (u.round - 1) then CFail (r, 1) else CCollate r in
  let turn r = [(fun _ -> CAnswer r); read r; collate r; (fun _ -> CTake r); (fun _ -> CTrained r)] in
  let rec go s =
    List.iter (fun r ->
      let u = s.rank_of r in
      if Some u.round = moment && (u.at_phase = FILL || u.at_phase = OFFER) then moments.(r) <- u) all;
    let has_moved = ref false in
    let act s choose = match perform ranks cfg depth input s (choose s) with Some t -> has_moved := true; t | None -> s in
    let t = List.fold_left act s (List.concat_map turn all @ [(fun _ -> CExchange)]) in
    if !has_moved then go t else t in
  let whole = go (start cfg) in
  let s = if moment = None then whole else go (loaded (cfg 0) (fun r -> moments.(r))) in
  List.iter (fun r -> let u = s.rank_of r in print_endline (show_list show_step u.taken ^ " | " ^ show_outcome u.ended_as)) all

(* Of each rank its micro-steps: supervised tokens, or -1 for one that is idle. *)
let run_weights () =
  let scale = match word () with "mean" -> mean_scale | _ -> sum_scale in
  let micro () = match option () with None -> Idle (q_of 0) | Some n -> Batch (List.init n (fun _ -> q_of 0)) in
  let world = list (fun () -> list micro) in
  let show m = let q = scale world m in Printf.sprintf "%d/%d" q.qnum q.qden in
  print_endline (show_list (show_list show) world)

let checkpoint () =
  let k_read_samples = int () in let k_carried = list int in let k_taken = list int in
  { k_read_samples; k_carried; k_taken }

(* Samples of each rank, whose sid is their key where keys say what shares a micro-batch. *)
let run_plan () =
  let t_is_padded = bool () in let t_budget = int () in let t_limits = list int in let t_of = cost () in
  let t_multiple = int () in let t_at_least = int () in let t_at_most = option () in
  let t_is_alone = bool () in let t_is_idle = bool () in let t_is_at_ends = bool () in
  let t_near = int () in let t_far = int () in let t_exchanged = int () in let t_tried = int () in
  let terms = { t_is_padded; t_budget; t_limits; t_of; t_multiple; t_at_least; t_at_most; t_is_alone; t_is_idle; t_is_at_ends;
    t_near; t_far; t_exchanged; t_tried } in
  let key = if bool () then (fun x -> x.sid) else (fun x -> x.pos) in
  let problem = match word () with
    | "stay" -> Stay (list (fun () -> list sample))
    | "dealt" -> let all = list sample in Dealt (all, int ())
    | "homes" -> let all = list sample in Homes (all, int ())
    | name -> failwith ("no plan " ^ name) in
  print_endline (match plan_of terms key problem with None -> "refused" | Some rows -> show_list (show_list show_group) rows)

let answer = function
  | "plan" -> run_plan ()
  | "rest" ->
      let base = list (fun () -> list checkpoint) in
      print_endline (show_list show_int (rest_of base (list int)))
  | "want" ->
      let ranks = int () in let total = int () in let is_packed = int () = 1 in let size = int () in let drawn = int () in
      let size = shared_window ranks total is_packed size drawn in
      let held = list sample in print_endline (show_int (wish_for size held (list sample)))
  | "sized" ->
      let sizes = sizes () in let budget = int () in let most = int () in let limits = list int in
      print_endline (show_list show_group (compute_sized_groups (friendly_in sizes) budget most limits (list sample)))
  | "sized_align" ->
      let sizes = sizes () in let target = int () in let due = int () in
      let cost = cost () in let order = order () in
      let gauge = sized_gauge (friendly_in sizes) cost in
      let emitted, carried = align_in order gauge 0 (list (fun () -> list sample)) target due in
      print_endline (show_list show_group emitted ^ " " ^ show_group carried)
  | "shares" -> let wants = list int in print_endline (show_list show_int (shares wants (int ())))
  | "portions" ->
      let n = int () in let total = int () in let update = int () in
      let told = list (fun () -> list int) in
      let rounds = 1 + List.length told in
      let deal d (j, loads) =
        let k = update * rounds + 1 + j in
        let portion = portion_of n rounds total k d in
        print_endline (show_int d ^ " " ^ show_list show_int (portion_shares loads (d - first_of n total update) portion)); d + portion in
      ignore (List.fold_left deal (first_of n total update) (List.mapi (fun j loads -> (j, loads)) told))
  | "groups" ->
      let budget = int () in let most = int () in let limits = list int in
      print_endline (show_list show_group (compute_groups budget most limits (list sample)))
  | "rows" ->
      let budget = int () in let limits = list int in
      print_endline (show_list show_group (compute_rows budget limits (list sample)))
  | "runs" ->
      let layout = layout () in let budget = int () in let limits = list int in
      print_endline (show_list show_group (form_in Sampler layout 1 budget limits (list sample)))
  | "align" ->
      let target = int () in let due = int () in
      let layout = layout () in let cost = cost () in let order = order () in
      let emitted, carried = align_in order (gauge_of layout cost) 0 (list (fun () -> list sample)) target due in
      print_endline (show_list show_group emitted ^ " " ^ show_group carried)
  | "rule" -> let rule = rule () in print_endline (show_int (rule (offer ())))
  | "combine" -> let a = offer () in print_endline (show_offer (combine_offers a (offer ())))
  | "machine" -> run_events show_move
  | "shared" -> run_shared ()
  | "loading" -> run_events show_loaded
  | "system" -> run_system ()
  | "epoch" -> run_epoch ()
  | "weights" -> run_weights ()
  | name -> failwith ("no command " ^ name)

let () = try while true do match word () with "" -> raise End_of_file | name -> answer name done with End_of_file -> ()
