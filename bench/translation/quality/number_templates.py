"""Sentences with a gap for a number, by kind and language; four of each. `{}`: the number as the language writes it."""

from __future__ import annotations

Sentences = dict[str, dict[str, str]]

COUNTS = {
    "en": """There were {} people at the meeting.
She has collected {} stamps so far.
The village has {} inhabitants.
We sold {} tickets last week.""",
    "de": """Bei der Versammlung waren {} Personen.
Sie hat bisher {} Briefmarken gesammelt.
Das Dorf hat {} Einwohner.
Wir haben letzte Woche {} Karten verkauft.""",
    "fr": """Il y avait {} personnes à la réunion.
Elle a collectionné {} timbres jusqu'à présent.
Le village compte {} habitants.
Nous avons vendu {} billets la semaine dernière.""",
    "zh": """会议上有{}个人。
她到现在为止收集了{}枚邮票。
这个村子有{}个居民。
我们上周卖了{}张票。""",
}
VALUES = {
    "en": """The average value is {}.
The result of the calculation was {}.
He got a score of {} in the test.
The index rose to {} yesterday.""",
    "de": """Der Durchschnittswert beträgt {}.
Das Ergebnis der Rechnung war {}.
Er hat im Test {} Punkte bekommen.
Der Index stieg gestern auf {}.""",
    "fr": """La valeur moyenne est de {}.
Le résultat du calcul était {}.
Il a obtenu {} points au test.
L'indice est monté hier à {}.""",
    "zh": """平均值是{}。
计算的结果是{}。
他在考试中得了{}分。
指数昨天升到了{}。""",
}
PRICES = {
    "en": """This jacket costs {}.
The company paid {} for the building.
Can you lend me {}?
The repair cost him {}.""",
    "de": """Diese Jacke kostet {}.
Die Firma hat {} für das Gebäude bezahlt.
Kannst du mir {} leihen?
Die Reparatur hat ihn {} gekostet.""",
    "fr": """Cette veste coûte {}.
L'entreprise a payé {} pour le bâtiment.
Peux-tu me prêter {} ?
La réparation lui a coûté {}.""",
    "zh": """这件夹克要{}。
公司为这座楼付了{}。
你能借我{}吗？
修理花了他{}。""",
}
SHARES = {
    "en": """Sales grew by {} this year.
About {} of the students passed the exam.
The interest rate is {}.
Prices fell by {} in May.""",
    "de": """Der Umsatz ist dieses Jahr um {} gestiegen.
Etwa {} der Schüler haben die Prüfung bestanden.
Der Zinssatz beträgt {}.
Die Preise sind im Mai um {} gefallen.""",
    "fr": """Les ventes ont augmenté de {} cette année.
Environ {} des élèves ont réussi l'examen.
Le taux d'intérêt est de {}.
Les prix ont baissé de {} en mai.""",
    "zh": """今年的销售额增长了{}。
大约{}的学生通过了考试。
利率是{}。
五月份价格下降了{}。""",
}
DATES = {
    "en": """The contract was signed on {}.
She was born on {}.
The shop will open on {}.
Please send your answer before {}.""",
    "de": """Der Vertrag wurde am {} unterschrieben.
Sie wurde am {} geboren.
Das Geschäft wird am {} eröffnet.
Bitte schicken Sie Ihre Antwort vor dem {}.""",
    "fr": """Le contrat a été signé le {}.
Elle est née le {}.
Le magasin ouvrira le {}.
Veuillez envoyer votre réponse avant le {}.""",
    "zh": """合同于{}签署。
她出生于{}。
商店将于{}开业。
请在{}之前回复。""",
}
ISO = {
    "en": """The file was last changed on {}.
The deadline is {}.
Version 2 was released on {}.
The backup of {} is missing.""",
    "de": """Die Datei wurde zuletzt am {} geändert.
Die Frist endet am {}.
Version 2 ist am {} erschienen.
Die Sicherung vom {} fehlt.""",
    "fr": """Le fichier a été modifié le {}.
La date limite est le {}.
La version 2 est sortie le {}.
La sauvegarde du {} manque.""",
    "zh": """该文件最后修改于{}。
截止日期是{}。
版本2于{}发布。
{}的备份不见了。""",
}
TIMES = {
    "en": """The train leaves at {}.
The meeting begins at {}.
He arrived at {} yesterday.
The museum closes at {}.""",
    "de": """Der Zug fährt um {} ab.
Die Besprechung beginnt um {}.
Er ist gestern um {} angekommen.
Das Museum schließt um {}.""",
    "fr": """Le train part à {}.
La réunion commence à {}.
Il est arrivé hier à {}.
Le musée ferme à {}.""",
    "zh": """火车{}开。
会议{}开始。
他昨天{}到的。
博物馆{}关门。""",
}
PHONES = {
    "en": """Please call me at {}.
Our phone number is {}.
You can reach the office under {}.
For questions, dial {}.""",
    "de": """Bitte rufen Sie mich unter {} an.
Unsere Telefonnummer ist {}.
Das Büro ist unter {} erreichbar.
Bei Fragen wählen Sie {}.""",
    "fr": """Appelez-moi au {}, s'il vous plaît.
Notre numéro de téléphone est le {}.
Vous pouvez joindre le bureau au {}.
Pour toute question, composez le {}.""",
    "zh": """请打电话{}联系我。
我们的电话号码是{}。
您可以拨打{}联系办公室。
如有问题，请拨打{}。""",
}
RANGES = {
    "en": """Read pages {} by tomorrow.
The work takes {} days.
Children aged {} may take part.
The temperature is between {} degrees.""",
    "de": """Lies bis morgen die Seiten {}.
Die Arbeit dauert {} Tage.
Kinder im Alter von {} Jahren dürfen teilnehmen.
Die Temperatur liegt bei {} Grad.""",
    "fr": """Lisez les pages {} pour demain.
Le travail prend {} jours.
Les enfants de {} ans peuvent participer.
La température est de {} degrés.""",
    "zh": """明天之前读完第{}页。
这项工作需要{}天。
{}岁的孩子可以参加。
气温是{}度。""",
}
UNITS = {
    "en": """The package weighs exactly {}.
The bridge is {} long.
The tank holds {}.
The measured value was {}.""",
    "de": """Das Paket wiegt genau {}.
Die Brücke ist {} lang.
Der Tank fasst {}.
Der gemessene Wert war {}.""",
    "fr": """Le colis pèse exactement {}.
Le pont mesure {} de long.
Le réservoir contient {}.
La valeur mesurée était de {}.""",
    "zh": """这个包裹正好重{}。
这座桥长{}。
这个水箱能装{}。
测得的值是{}。""",
}
YEARS = {
    "en": """The war ended in {}.
He moved to Berlin in {}.
The house was built in {}.
In {} she won the prize.""",
    "de": """Der Krieg endete {}.
Er zog {} nach Berlin.
Das Haus wurde {} gebaut.
Im Jahr {} gewann sie den Preis.""",
    "fr": """La guerre a pris fin en {}.
Il a déménagé à Berlin en {}.
La maison a été construite en {}.
En {}, elle a gagné le prix.""",
    "zh": """战争于{}年结束。
他{}年搬到了柏林。
这座房子建于{}年。
{}年她得了奖。""",
}
VERSIONS = {
    "en": """Please install version {}.
The bug was fixed in {}.
Python {} is required.
Upgrade to {} before you start.""",
    "de": """Bitte installieren Sie Version {}.
Der Fehler wurde in {} behoben.
Python {} wird benötigt.
Aktualisieren Sie vor dem Start auf {}.""",
    "fr": """Veuillez installer la version {}.
Le bogue a été corrigé dans {}.
Python {} est nécessaire.
Passez à {} avant de commencer.""",
    "zh": """请安装版本{}。
这个错误已在{}中修复。
需要 Python {}。
开始之前请升级到{}。""",
}
NUMBERED = {
    "en": """Your order number is {}.
Please quote reference {} in your reply.
He lives in room {}.
The account {} has been closed.""",
    "de": """Ihre Bestellnummer ist {}.
Bitte geben Sie in Ihrer Antwort das Aktenzeichen {} an.
Er wohnt in Zimmer {}.
Das Konto {} wurde geschlossen.""",
    "fr": """Votre numéro de commande est {}.
Veuillez indiquer la référence {} dans votre réponse.
Il habite dans la chambre {}.
Le compte {} a été fermé.""",
    "zh": """您的订单号是{}。
请在回复中注明编号{}。
他住在{}号房间。
账户{}已经关闭。""",
}
HALF_DAYS = {
    "en": """The meeting starts at {} on Monday.
We left at {} yesterday.
The shop closes at {} today.
Call me at {} tomorrow.""",
    "de": """Die Sitzung beginnt am Montag um {}.
Wir sind gestern um {} losgefahren.
Das Geschäft schließt heute um {}.
Ruf mich morgen um {} an.""",
    "fr": """La réunion commence lundi à {}.
Nous sommes partis hier à {}.
Le magasin ferme aujourd'hui à {}.
Appelle-moi demain à {}.""",
    "zh": """会议星期一{}开始。
我们昨天{}出发。
商店今天{}关门。
明天{}给我打电话。""",
}
